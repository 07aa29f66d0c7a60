"""Whatever is wrong with a file, a reader raises UserError and nothing else, at once and without eating memory."""

import functools
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import sentencepiece
from checkpoint_builders import CONFIG, llama_tensors, write_folder, write_gguf
from fuzzing import INTEGERS, JSON, accepts_or_refuses, changed_json, damaged, profile
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from models.quantization import dynamic, nf4
from zagora_jax.base import open_base
from zagora_jax.checkpoints import AdapterConfig, load_tokenizer, open_checkpoint, read_adapter, write_adapter
from zagora_jax.checkpoints.gguf import GGUFCheckpoint
from zagora_jax.checkpoints.safetensors_file import read_header, read_tensor
from zagora_jax.option_groups import LoraConfig

QUICK = profile(100)
SLOWER = profile(30)


@pytest.fixture(scope="module", autouse=True)
def quiet():
    """Thousands of damaged files are warned of."""
    loggers = [logging.getLogger(name) for name in ("transformers", "zagora_jax")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(scope="module", autouse=True)
def everything_imported(tmp_path_factory):
    """What a first use imports is not counted as an example's."""
    folder = write_folder(tmp_path_factory.mktemp("first"))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    load_tokenizer(open_checkpoint(str(folder)))
    open_base(str(folder), quantization="nf4", dtype="float32", lora=LoraConfig())


SAFETENSORS = save(dict(list(llama_tensors().items())[:3]))
HEADER_END = 8 + int.from_bytes(SAFETENSORS[:8], "little")
HEADER = json.loads(SAFETENSORS[8:HEADER_END])


def with_header(header: object) -> bytes:
    encoded = json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + SAFETENSORS[HEADER_END:]


@QUICK
@given(damaged(SAFETENSORS[:HEADER_END]) | changed_json(HEADER).map(with_header))
def test_safetensors_headers(tmp_path, header):
    path = tmp_path / "x.safetensors"
    path.write_bytes(header + SAFETENSORS[HEADER_END:])
    for info in (accepts_or_refuses(lambda: read_header(path), tmp_path) or {}).values():
        assert read_tensor(info).shape == info.shape


@QUICK
@given(st.dictionaries(st.text(max_size=5), JSON, max_size=3), st.binary(max_size=40))
def test_safetensors_headers_of_any_content(tmp_path, header, data):
    encoded = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    accepts_or_refuses(lambda: read_header(path), tmp_path)


@QUICK
@given(st.data())
def test_gguf_files(tmp_path, data):
    original = tmp_path / "original.gguf"
    if not original.exists():
        write_gguf(original)
    content = original.read_bytes()
    # The first kilobytes hold metadata and tensor table; the rest are weights, of which every value is good.
    path = tmp_path / "x.gguf"
    path.write_bytes(data.draw(damaged(content[:4000])) + content[4000:])
    checkpoint = accepts_or_refuses(lambda: GGUFCheckpoint.open(path, "x"), tmp_path)
    if checkpoint:
        for name, info in checkpoint.tensors.items():
            assert checkpoint.read(name).shape == info.shape


INDEX = "model.safetensors.index.json"
NAMES = st.sampled_from(["../b.safetensors", "/etc/passwd", "a.safetensors", "sub/../../b.safetensors", "~", "\0", ""])


@QUICK
@given(st.data())
def test_indexes(tmp_path, data):
    folder = tmp_path / "model"
    if not folder.exists():
        write_folder(folder, shards=["a.safetensors", "b.safetensors"])
        (folder / "index").write_bytes((folder / INDEX).read_bytes())
        (tmp_path / "b.safetensors").write_bytes((folder / "b.safetensors").read_bytes())
    index = (folder / "index").read_bytes()
    content = json.loads(index)
    content["weight_map"][data.draw(st.sampled_from(sorted(content["weight_map"])))] = data.draw(NAMES)
    changed = data.draw(damaged(index) | changed_json(json.loads(index)).map(dumped) | st.just(dumped(content)))
    (folder / INDEX).write_bytes(changed)
    accepts_or_refuses(lambda: open_checkpoint(str(folder)), folder)


def dumped(content: object) -> bytes:
    return json.dumps(content).encode()


FIELDS = [*CONFIG, "quantization_config", "auto_map", "rope_scaling", "sliding_window", "layer_types", "mlp_bias"]


@QUICK
@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, JSON | INTEGERS)),
    st.none() | st.sampled_from(["mistral", "qwen2", "qwen3", "smollm3", "phi3", "gpt2"]),
)
def test_configs(tmp_path, changes, family):
    folder = tmp_path / "model"
    if not folder.exists():
        write_folder(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes | ({"model_type": family} if family else {})))
    opened = functools.partial(open_base, str(folder), quantization="nf4", dtype="float32", lora=LoraConfig())
    accepts_or_refuses(opened, folder)


@QUICK
@given(damaged(json.dumps(CONFIG).encode()))
def test_damaged_configs(tmp_path, content):
    folder = tmp_path / "model"
    if not folder.exists():
        write_folder(folder)
    (folder / "config.json").write_bytes(content)
    accepts_or_refuses(lambda: open_checkpoint(str(folder)), folder)


PACKED = "model.layers.0.self_attn.q_proj.weight"
STATE = {
    "quant_type": "nf4",
    "blocksize": 64,
    "dtype": "bfloat16",
    "shape": [64, 64],
    "nested_blocksize": 256,
    "nested_dtype": "float32",
    "nested_offset": 0.5,
}
PARTS = {
    "": np.full((64 * 64 // 2, 1), 0x77, np.uint8),
    ".absmax": np.full(64, 127, np.uint8),
    ".quant_map": nf4.TABLE,
    ".nested_absmax": np.ones(1, np.float32),
    ".nested_quant_map": dynamic.dynamic_map(signed=True),
}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
SIZES = st.sampled_from([(0,), (1,), (64,), (255,), (2048, 1), (64, 64), (2, 2)])


@QUICK
@given(st.data())
def test_packed_weights(tmp_path, data):
    """bitsandbytes' and block-fp8's, with parts left out or of other sizes, and settings that are damaged."""
    folder, tensors = tmp_path / "model", llama_tensors()
    if data.draw(st.booleans()):
        settings, original = BNB, dumped(STATE)
        state = data.draw(st.just(original) | damaged(original) | changed_json(STATE).map(dumped))
        parts = PARTS | {".quant_state.bitsandbytes__nf4": np.frombuffer(state, np.uint8)}
    else:
        weight = np.ones((64, 64), ml_dtypes.float8_e4m3fn)
        parts, settings = {"": weight, "_scale_inv": np.ones((2, 2), np.float32)}, FP8
    changed = data.draw(st.sampled_from([None, None, *parts]))
    if changed is not None:
        parts = {name: part for name, part in parts.items() if name != changed}
        if data.draw(st.booleans()):
            parts[changed] = np.ones(data.draw(SIZES), data.draw(st.sampled_from([np.uint8, np.float32, np.int64])))
    del tensors[PACKED]
    tensors |= {f"{PACKED}{name}": part for name, part in parts.items() if part.size}
    write_folder(folder, tensors, quantization_config=data.draw(st.just(settings) | changed_json(settings)))
    checkpoint = accepts_or_refuses(lambda: open_checkpoint(str(folder)), folder)
    if checkpoint and PACKED in checkpoint.tensors:
        read = accepts_or_refuses(lambda: checkpoint.read(PACKED), folder)
        assert read is None or read.shape == checkpoint.tensors[PACKED].shape


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
}
TOKENIZER_CONFIG = {"bos_token": "a", "eos_token": "b", "chat_template": "x", "added_tokens_decoder": {}}


@SLOWER
@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys(TOKENIZER_CONFIG, JSON)),
    damaged(dumped(TOKENIZER)) | changed_json(TOKENIZER).map(dumped) | st.just(dumped(TOKENIZER)),
    st.none() | JSON,
)
def test_tokenizer_files(tmp_path, changes, content, added):
    folder = tmp_path / "model"
    if not folder.exists():
        write_folder(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG | changes))
    (folder / "added_tokens.json").write_text(json.dumps({} if added is None else added))
    (folder / "chat_template.json").write_text(json.dumps({} if added is None else {"chat_template": added}))
    (folder / "tokenizer.json").write_bytes(content)
    accepts_or_refuses(lambda: load_tokenizer(open_checkpoint(str(folder))), folder)


@functools.cache
def sentencepiece_model(kind: str) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["Hello world, hello  there"] * 30),
        model_writer=model,
        vocab_size=30,
        hard_vocab_limit=False,
        model_type=kind,
        normalization_rule_name="identity" if kind == "bpe" else "nmt_nfkc",
        remove_extra_whitespaces=kind != "bpe",
        minloglevel=2,
    )
    return model.getvalue()


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@SLOWER
@given(st.data())
def test_sentencepiece_models(tmp_path, kind, data):
    folder = tmp_path / "model"
    if not folder.exists():
        write_folder(folder)
    (folder / "tokenizer.model").write_bytes(data.draw(damaged(sentencepiece_model(kind))))
    accepts_or_refuses(lambda: load_tokenizer(open_checkpoint(str(folder))), folder)


@QUICK
@given(st.data())
def test_adapters(tmp_path, data):
    folder = tmp_path / "adapter"
    if not folder.exists():
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
        tensors = {name.format("A"): np.ones((2, 8), np.float32), name.format("B"): np.ones((4, 2), np.float32)}
        write_adapter(folder, tensors, AdapterConfig(r=2, lora_alpha=4, target_modules=("q_proj",)))
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (tmp_path / file).write_bytes((folder / file).read_bytes())
    config = (tmp_path / "adapter_config.json").read_bytes()
    changes = data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(json.loads(config), JSON)))
    as_it_was, changed = st.just(config), st.just(dumped(json.loads(config) | changes))
    (folder / "adapter_config.json").write_bytes(data.draw(as_it_was | changed | damaged(config)))
    weights = (tmp_path / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(data.draw(st.just(weights) | damaged(weights)))
    accepts_or_refuses(lambda: read_adapter(folder), folder)


@pytest.mark.slow
def test_thousands_of_examples():
    """The tests of this file and of the data files, with many more examples each."""
    files = [__file__, str(Path(__file__).parents[1] / "data" / "test_fuzz.py")]
    environment = os.environ | {"FUZZ_EXAMPLES": "3000"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *files, "-x"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
@profile(300)
@given(st.data())
def test_a_real_model(smollm2, tmp_path_factory, data):
    """SmolLM2's GGUF file with damage to its metadata, tokenizer and tensor table, the first 3 MB."""
    content = Path(smollm2).read_bytes() if not _real else _real[0]
    _real[:] = [content]
    head, path = content[: 3 * 2**20], tmp_path_factory.getbasetemp() / "real.gguf"
    path.write_bytes(data.draw(damaged(head)) + content[len(head) :])
    checkpoint = accepts_or_refuses(lambda: GGUFCheckpoint.open(path, "x"), path.parent)
    if checkpoint:
        accepts_or_refuses(lambda: load_tokenizer(checkpoint), path.parent)


_real: list[bytes] = []
