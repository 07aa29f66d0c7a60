"""Independent references for tests: tiny checkpoints, and what transformers, PEFT and bitsandbytes make of them.

The builders (`tiny_tokenizer`, `tiny_llama`, `random_adapter`, `write_adapter`) need no torch and share no code with
the product. The oracles import torch, PEFT and bitsandbytes when called: a test that uses one begins with
`pytest.importorskip("torch")`. Everything here is deterministic: the same arguments give the same bytes.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ml_dtypes
import numpy as np
import safetensors.numpy
from huggingface_hub import split_state_dict_into_shards_factory
from transformers import LlamaConfig, PreTrainedTokenizerFast

if TYPE_CHECKING:
    import torch

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A chat template without generation marks, as most models ship it."""

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

STORAGE = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


class Batch(Protocol):
    """What an oracle reads of an optimizer step's batch: arrays [A, M, S], as `zagora_jax.data` makes them."""

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray


@dataclasses.dataclass(frozen=True)
class ArrayBatch:
    """A `Batch` of plain arrays [A, M, S]."""

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray


def random_batch(
    seed: int, shape: tuple[int, int, int] = (1, 2, 24), *, vocab_size: int = 320, packed: bool = False
) -> ArrayBatch:
    """Random tokens [A, M, S] whose sequences hold one row, or two rows and some padding where `packed`."""
    rng = np.random.default_rng(seed)
    width = shape[-1]
    tokens = rng.integers(0, vocab_size, shape).astype(np.int32)
    segment_ids = np.ones(shape, np.int32)
    if packed:
        first, end = width // 3, width - width // 8
        segment_ids[..., first:end] = 2
        segment_ids[..., end:] = 0
    starts = np.diff(segment_ids, axis=-1, prepend=-1) != 0
    places = np.arange(width, dtype=np.int32)
    positions = (places - np.maximum.accumulate(np.where(starts, places, 0), axis=-1)).astype(np.int32)
    same_row = np.concatenate(
        [segment_ids[..., 1:] == segment_ids[..., :-1], np.zeros((*shape[:-1], 1), bool)], axis=-1
    )
    supervised = same_row & (segment_ids > 0) & (rng.random(shape) < 0.6)
    return ArrayBatch(
        tokens=tokens,
        targets=np.roll(tokens, -1, axis=-1),
        weights=supervised.astype(np.float32),
        segment_ids=segment_ids,
        positions=positions,
    )


# --- Builders: files without torch ------------------------------------------------------------------------------------


def tiny_tokenizer(
    directory: Path, *, chat_template: str | None = CHATML, add_bos: bool = False
) -> PreTrainedTokenizerFast:
    """Saves and returns a byte-level tokenizer: 256 bytes and three special tokens, pad = eos = `<|im_end|>`.

    Args:
        directory: where tokenizer.json and tokenizer_config.json go.
        chat_template: a Jinja template, or None for a tokenizer without one.
        add_bos: whether encoding prepends `<|im_start|>` by itself, as Llama's tokenizers do.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [AddedToken(token, special=True) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    if add_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A",
            pair="<|im_start|> $A $B",
            special_tokens=[("<|im_start|>", core.token_to_id("<|im_start|>"))],
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=256,
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    return tokenizer


def tiny_llama(
    directory: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: int | str = "5GB",
    tokenizer: bool = True,
    **config: Any,
) -> Path:
    """Writes a random LlamaForCausalLM as a Hugging Face directory and returns the directory.

    Two layers, d 64, ffn 192, 4 heads over 2 key-value heads, vocabulary 320 (more rows than the tokenizer has tokens).

    Args:
        directory: made where it is missing.
        seed: of the weights.
        dtype: how tensors are stored: float32, float16 or bfloat16.
        max_shard_size: bytes, or a text such as "100KB": above it the file is split and an index written.
        tokenizer: whether `tiny_tokenizer` accompanies the weights.
        **config: fields of transformers' LlamaConfig that differ from the above, for instance
            `tie_word_embeddings=True`, `head_dim=24` or `rope_parameters={"rope_type": "linear", "factor": 2.0, ...}`.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    defaults: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 256,
        "bos_token_id": 257,
        "eos_token_id": 258,
        "pad_token_id": 258,
        "architectures": ["LlamaForCausalLM"],
        "dtype": dtype,
    }
    llama: Any = LlamaConfig(**(defaults | config))
    llama.save_pretrained(directory)
    _write_sharded(directory, _random_weights(llama, np.random.default_rng(seed), STORAGE[dtype]), max_shard_size)
    if tokenizer:
        tiny_tokenizer(directory)
    return directory


def tiny_model(directory: Path, model_type: str, *, seed: int = 0, tokenizer: bool = False, **config: Any) -> Path:
    """Writes a random model of any of transformers' families, of the sizes of `tiny_llama`, and returns the directory.

    The module names and shapes are those of transformers' own torch model.

    Args:
        directory: made where it is missing.
        model_type: as in config.json, for instance "qwen2".
        seed: of the weights.
        tokenizer: whether `tiny_tokenizer` accompanies the weights.
        **config: fields of the family's configuration class.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 256,
        "bos_token_id": 257,
        "eos_token_id": 258,
        "pad_token_id": 258,
    }
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(sizes | config)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            # Of unit gain, so that every layer, norm and bias matters to the logits.
            std = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.3
            parameter.normal_(1.0 if "norm" in name else 0.0, std, generator=generator)
    network.save_pretrained(directory)
    if tokenizer:
        tiny_tokenizer(directory)
    return Path(directory)


def _random_weights(config: Any, rng: np.random.Generator, dtype: np.dtype) -> dict[str, np.ndarray]:
    """Weights of unit gain, so that every layer, the attention and the biases matter to the logits."""
    d, ffn, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim

    def normal(*shape: int, std: float, mean: float = 0.0) -> np.ndarray:
        return (mean + std * rng.standard_normal(shape, dtype=np.float32)).astype(dtype)

    weights = {"model.embed_tokens.weight": normal(config.vocab_size, d, std=0.3)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = normal(d, std=0.2, mean=1.0)
        for name, out, width, bias in (
            ("self_attn.q_proj", q, d, config.attention_bias),
            ("self_attn.k_proj", kv, d, config.attention_bias),
            ("self_attn.v_proj", kv, d, config.attention_bias),
            ("self_attn.o_proj", d, q, config.attention_bias),
            ("mlp.gate_proj", ffn, d, config.mlp_bias),
            ("mlp.up_proj", ffn, d, config.mlp_bias),
            ("mlp.down_proj", d, ffn, config.mlp_bias),
        ):
            weights[f"{prefix}{name}.weight"] = normal(out, width, std=width**-0.5)
            if bias:
                weights[f"{prefix}{name}.bias"] = normal(out, std=0.5)
    weights["model.norm.weight"] = normal(d, std=0.2, mean=1.0)
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = normal(config.vocab_size, d, std=0.3)
    return weights


def _write_sharded(directory: Path, tensors: Mapping[str, np.ndarray], max_shard_size: int | str) -> None:
    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    for file, names in split.filename_to_tensors.items():
        safetensors.numpy.save_file(
            {name: tensors[name] for name in names}, directory / file, metadata={"format": "pt"}
        )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def random_adapter(
    model: Path, *, rank: int = 4, seed: int = 0, targets: Sequence[str] = PROJECTIONS
) -> dict[str, np.ndarray]:
    """LoRA tensors under PEFT's names for a checkpoint: A [r, in] and B [out, r], float32, both non-zero.

    B is not zero, as it is at the start of a real training, so that A has a gradient and logits show the adapter.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, (out, width) in sorted(_weight_shapes(model).items()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            tensors[f"base_model.model.{module}.lora_A.weight"] = (
                rng.standard_normal((rank, width), np.float32) * width**-0.5
            )
            tensors[f"base_model.model.{module}.lora_B.weight"] = rng.standard_normal((out, rank), np.float32) * 0.05
    return tensors


def _weight_shapes(model: Path) -> dict[str, tuple[int, int]]:
    shapes = {}
    for file in sorted(Path(model).glob("*.safetensors")):
        with safetensors.safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                shape = tensors.get_slice(name).get_shape()
                if len(shape) == 2:
                    shapes[name] = (shape[0], shape[1])
    return shapes


def write_adapter(
    directory: Path,
    tensors: Mapping[str, np.ndarray],
    *,
    alpha: float = 8,
    use_rslora: bool = False,
    targets: Sequence[str] | str = PROJECTIONS,
) -> Path:
    """Writes a PEFT adapter directory from tensors under PEFT's names and returns it; the rank is A's first axis."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": next(tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name),
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "use_rslora": use_rslora,
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "bias": "none",
        "base_model_name_or_path": None,
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2))
    safetensors.numpy.save_file(dict(tensors), directory / "adapter_model.safetensors", metadata={"format": "pt"})
    return directory


# --- Oracles: transformers, PEFT, bitsandbytes ------------------------------------------------------------------------


def transformers_logits(
    model: Path,
    tokens: np.ndarray,
    *,
    dtype: str = "float32",
    positions: np.ndarray | None = None,
    segment_ids: np.ndarray | None = None,
    adapter: Path | None = None,
    quantization: str = "none",
) -> np.ndarray:
    """Logits float32 [B, S, V] of transformers' eager model, under a PEFT adapter where one is given.

    Args:
        model: a Hugging Face directory.
        tokens: int [B, S].
        dtype: of weights and computation, by torch's name.
        positions: int [B, S]; by default 0, 1, 2, ...
        segment_ids: int [B, S]: tokens attend within their own segment alone.
        adapter: a PEFT adapter directory.
        quantization: "none", or "nf4" for the base as bitsandbytes quantises and dequantises it.
    """
    import torch

    network = load_peft(model, adapter, quantization, dtype) if adapter else load_base(model, quantization, dtype)
    with torch.no_grad():
        logits = network(
            input_ids=_long(tokens),
            position_ids=None if positions is None else _long(positions),
            attention_mask=None if segment_ids is None else _mask(segment_ids, network.dtype),
        ).logits
    return logits.float().numpy()


@dataclasses.dataclass(frozen=True)
class Gradients:
    """One optimizer step's loss and the gradients of the adapter, under PEFT's names and shapes."""

    loss: float
    tensors: dict[str, np.ndarray]


def peft_bnb_gradients(
    model: Path, adapter: Path, batch: Batch, *, quantization: str = "nf4", masked: bool = True
) -> Gradients:
    """LoRA gradients of PEFT over bitsandbytes' NF4 (double quantisation), float32 computation, on the CPU.

    The loss is sum / count of the supervised tokens over the whole batch [A, M, S]. The scale (alpha/r or rsLoRA's
    alpha/sqrt(r)) is what the adapter's own adapter_config.json says.

    Args:
        model: a Hugging Face directory.
        adapter: a PEFT adapter directory, such as `write_adapter` makes.
        batch: one optimizer step's.
        quantization: "nf4", or "none" for the float32 base.
        masked: whether tokens attend within their segment by a mask that is given to the model. False leaves the mask
            to the model, which alone knows of sliding windows; each sequence must then be one row.
    """
    network = load_peft(model, adapter, quantization)
    loss = _accumulate(network, batch, masked)
    tensors = {_tensor_name(name): p.grad.numpy() for name, p in network.named_parameters() if p.requires_grad}
    return Gradients(loss, tensors)


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """The losses (before each update), the gradient norms (before clipping) and the adapter after the last step."""

    losses: list[float]
    gradient_norms: list[float]
    adapter: dict[str, np.ndarray]


def peft_training_run(
    model: Path,
    adapter: Path,
    batches: Iterable[Batch],
    learning_rate: float | Sequence[float],
    *,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    quantization: str = "nf4",
) -> TrainingRun:
    """Trains a PEFT adapter with torch's AdamW, one optimizer step a batch [A, M, S], in float32.

    Args:
        model: a Hugging Face directory.
        adapter: the PEFT adapter directory to start from.
        batches: one for every optimizer step.
        learning_rate: a constant, or one value for every step.
        weight_decay: AdamW's, decoupled.
        max_grad_norm: clips the global norm of the adapter's gradients; None leaves them.
        betas: AdamW's.
        eps: AdamW's.
        quantization: "nf4", or "none" for the float32 base.
    """
    import torch

    network = load_peft(model, adapter, quantization)
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=0.0, betas=betas, eps=eps, weight_decay=weight_decay)
    losses, norms = [], []
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = learning_rate if isinstance(learning_rate, float) else learning_rate[step]
        optimizer.zero_grad()
        losses.append(_accumulate(network, batch))
        norm = torch.nn.utils.clip_grad_norm_(
            trained.values(), float("inf") if max_grad_norm is None else max_grad_norm
        )
        norms.append(float(norm))
        optimizer.step()
    return TrainingRun(losses, norms, {_tensor_name(name): p.detach().numpy() for name, p in trained.items()})


def load_base(model: Path, quantization: str = "none", dtype: str = "float32") -> Any:
    """transformers' model of a directory; a tensor that is missing, left over or mis-shaped is an error.

    With "nf4" each linear layer but lm_head is bitsandbytes' Linear4bit, and nothing here is cached or shared: see
    `_evaluating`. Input widths must then be multiples of 64: for others, bitsandbytes' AVX-512 kernel (0.50) begins
    the blocks anew with each row when it dequantises a matrix, though its quantiser lets them span rows, and returns
    wrong weights. For those, compare with `quantize_4bit` and `dequantize_4bit` of the flattened weight.
    """
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options: dict[str, Any] = {}
    if quantization == "nf4":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, dtype),
        )
        options["device_map"] = {"": "cpu"}
    elif quantization != "none":
        raise ValueError(f"quantization is 'none' or 'nf4', not {quantization!r}")
    load: Any = AutoModelForCausalLM.from_pretrained
    network, report = load(
        model,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        local_files_only=True,
        output_loading_info=True,
        **options,
    )
    problems = {kind: found for kind, found in report.items() if found}
    if problems:
        raise ValueError(f"{model}: {problems}")
    if quantization == "nf4":
        for name, module in network.named_modules():
            if type(module).__name__ == "Linear4bit" and module.in_features % 64:
                raise ValueError(f"{name}: {module.in_features} inputs are no multiple of 64; see load_base")
    return _evaluating(network)


def _evaluating(network: Any) -> Any:
    """Switches dropout off, while Linear4bit stays in train mode.

    In eval mode, on a CPU, its forward repacks the codes for good: backward then gives no LoRA gradient, a later save
    differs (bitsandbytes 0.50, nn/modules.py).
    """
    network.eval()
    for module in network.modules():
        if type(module).__name__ == "Linear4bit":
            module.training = True
    return network


def load_peft(model: Path, adapter: Path, quantization: str = "none", dtype: str = "float32") -> Any:
    """PEFT's trainable model of an adapter directory over `load_base`, dropout off; the adapter stays float32."""
    import peft

    network = peft.PeftModel.from_pretrained(load_base(model, quantization, dtype), str(adapter), is_trainable=True)
    expected = set(safetensors.numpy.load_file(Path(adapter) / "adapter_model.safetensors"))
    found = {_tensor_name(name) for name, p in network.named_parameters() if p.requires_grad}
    if network.peft_config["default"].ensure_weight_tying:  # the head's is the embedding's, which is trained
        expected.discard("base_model.model.lm_head.weight")
    if expected != found:  # PEFT leaves a tensor that it finds no place for, or no file of, without an error.
        raise ValueError(f"{adapter}: its file and PEFT's model differ in {sorted(expected ^ found)}")
    return _evaluating(network)


def _accumulate(network: Any, batch: Batch, masked: bool = True) -> float:
    """Adds d(sum / count)/d(adapter) over the micro-batches to `.grad`; returns sum / count."""
    import torch

    count = float(np.asarray(batch.weights, np.float64).sum())
    total = 0.0
    for index in range(len(batch.tokens)):
        logits = network(
            input_ids=_long(batch.tokens[index]),
            position_ids=_long(batch.positions[index]),
            attention_mask=_mask(batch.segment_ids[index], network.dtype) if masked else None,
        ).logits
        losses = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), _long(batch.targets[index]).flatten(), reduction="none"
        )
        loss = (losses * torch.from_numpy(np.array(batch.weights[index], np.float32)).flatten()).sum() / count
        loss.backward()
        total += loss.item()
    return total


def _mask(segment_ids: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The additive causal mask [B, 1, S, S] that keeps attention within a segment; padding attends to padding."""
    import torch

    segments = _long(segment_ids)
    width = segments.shape[-1]
    allowed = (segments[:, :, None] == segments[:, None, :]) & torch.ones(width, width, dtype=torch.bool).tril()
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)[:, None]


def _long(array: np.ndarray) -> torch.Tensor:
    import torch

    return torch.from_numpy(np.array(array, np.int64))


def _tensor_name(parameter: str) -> str:
    """The name in adapter_model.safetensors of a parameter of PEFT's model (which adds the adapter's name)."""
    name = re.sub(r"\.lora_magnitude_vector\.default\.weight$", ".lora_magnitude_vector", parameter)
    name = re.sub(r"\.(lora_embedding_[AB])\.default$", r".\1", name)
    name = re.sub(r"\.modules_to_save\.default\.weight$", ".weight", name)
    return re.sub(r"\.lora_([AB])\.default\.weight$", r".lora_\1.weight", name)
