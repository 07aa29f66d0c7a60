"""Adapters that begin as a part of the weights, against PEFT and a plain singular value decomposition."""

import json

import jax
import numpy as np
import oracles
import pytest
from subjects import assert_logits_equal

from models.lora import initial_adapter
from models.parameters import by_path, split
from models.quantization import dequantize
from zagora_jax.adapter import peft_config, peft_shapes, peft_tensors
from zagora_jax.base import open_base
from zagora_jax.checkpoints.peft import read_adapter, write_adapter
from zagora_jax.checkpoints.safetensors_file import read_header, read_tensor
from zagora_jax.commands import ExportConfig
from zagora_jax.config import TrainConfig
from zagora_jax.config_file import save_config
from zagora_jax.errors import UserError
from zagora_jax.exporter import export
from zagora_jax.factors import InitialFactors, principal_factors
from zagora_jax.option_groups import LoraConfig
from zagora_jax.run_directory import RunDirectory
from zagora_jax.tuned import open_tuned

pytest.importorskip("torch")

PREFIX = "base_model.model."


def lora_of(kind, **options):
    given = {"rank": 4, "alpha": 8, "targets": ["q_proj", "down_proj"], "rank_pattern": ["down_proj=3"]}
    return LoraConfig(**given | {"initialization": kind} | options)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return oracles.tiny_llama(tmp_path_factory.mktemp("base") / "model")


def begun(model, lora, quantization):
    """The base model as it is held, and what the adapters begin as, by PEFT's names."""
    base = open_base(str(model), quantization=quantization, dtype="float32", lora=lora)
    factors = InitialFactors(base.model, lora.initialization, quantization)
    frozen = base.load(prepare=factors)
    adapters = initial_adapter(split(base.model)[2], 0, originals=factors.of_parameters)
    return base, frozen, peft_tensors(base.model, adapters)


def product(tensors, name):
    stem = f"{PREFIX}{name.removesuffix('.weight')}.lora_"
    return tensors[f"{stem}B.weight"] @ tensors[f"{stem}A.weight"]


def held(frozen, name):
    _, _, layer, *module = name.split(".")
    stack = by_path(frozen)["model", "layers", *module].get_value()
    return np.asarray(dequantize(jax.tree.map(lambda leaf: leaf[int(layer)], stack), np.float32))


@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_factors_are_the_best_of_their_rank(decay):
    rng = np.random.default_rng(0)
    u, s, v = np.linalg.svd(rng.standard_normal((96, 160), np.float32), full_matrices=False)
    s = s * np.arange(1, len(s) + 1, dtype=np.float32) ** -decay
    weight = (u * s) @ v
    b, a = map(np.asarray, principal_factors(weight, jax.random.key(0), 5))
    np.testing.assert_allclose(b @ a, (u[:, :5] * s[:5]) @ v[:5], atol=1e-4 * s[0])
    np.testing.assert_allclose(b.T @ b, a @ a.T, atol=1e-4 * s[0])  # both have the roots of the singular values


def test_pissa_is_that_of_peft(model):
    import peft

    lora = lora_of("pissa")
    _, frozen, tensors = begun(model, lora, "none")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=lora.targets,
        rank_pattern=lora.rank_patterns,
        init_lora_weights="pissa",
        task_type="CAUSAL_LM",
    )
    theirs = dict(peft.get_peft_model(oracles.load_base(model), config).named_parameters())
    for module in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        weight = theirs[f"{PREFIX}{module}.base_layer.weight"].detach().numpy()
        a, b = (theirs[f"{PREFIX}{module}.lora_{side}.default.weight"].detach().numpy() for side in "AB")
        assert b.shape[1] == (4 if "q_proj" in module else 3)
        # Single precision; a weight's elements are of the order of 0.1, its largest singular value is near 2.
        np.testing.assert_allclose(held(frozen, f"{module}.weight"), weight, atol=1e-5)
        np.testing.assert_allclose(product(tensors, module), b @ a, atol=1e-5)


def test_loftq_begins_with_what_bitsandbytes_loses(model):
    """As PEFT's replace_lora_weights_loftq, which takes the principal part of W - dequantised(quantised(W))."""
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    lora = lora_of("loftq", alpha=12)
    base, frozen, tensors = begun(model, lora, "nf4")
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        weight = torch.from_numpy(base.checkpoint.read(name))
        theirs = dequantize_4bit(*quantize_4bit(weight, quant_type="nf4", compress_statistics=True))
        np.testing.assert_array_equal(held(frozen, name), theirs.numpy())
        u, s, v = torch.linalg.svd(weight - theirs, full_matrices=False)
        rank, scale = (4, 3) if "q_proj" in name else (3, 4)
        best = (u[:, :rank] * s[:rank]) @ v[:rank]
        np.testing.assert_allclose(scale * product(tensors, name), best.numpy(), atol=2e-5)


def run_of(folder, model, lora, quantization="none"):
    """A run that began so, and whose adapter has moved since."""
    run = RunDirectory(folder)
    run.create()
    base, _, initial = begun(model, lora, quantization)
    config = TrainConfig(
        model=str(model), data=["rows.jsonl"], lora=lora, quantization=quantization, compute_dtype="float32"
    )
    save_config(config, run.config)
    options = config.model_dump(mode="json")
    report = {"synthetic": False, "model_fingerprint": base.fingerprint(), "options": options}
    run.report.write_text(json.dumps(report))
    rng = np.random.default_rng(0)
    moved = {name: tensor + rng.normal(0, 0.02, tensor.shape).astype(np.float32) for name, tensor in initial.items()}
    saved = peft_config(base.model, lora, str(model))
    write_adapter(run.initial_adapter, initial, saved)
    write_adapter(run.adapter, moved, saved, trained=True)
    return run


def our_logits(run, tokens):
    from flax import nnx

    tuned = open_tuned(run.path)
    model = nnx.merge(tuned.graph, tuned.base.load(), tuned.adapters)
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    return np.asarray(model.logits(model.hidden_states(tokens, positions, None, kernel="reference")))


@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "alpha_pattern": ["q_proj=3"]}], ids=["plain", "rslora"])
def test_what_pissa_trained_is_what_peft_and_transformers_compute(tmp_path, model, options):
    run = run_of(tmp_path / "run", model, lora_of("pissa", **options))
    tokens = np.random.default_rng(1).integers(0, 320, (1, 120))
    ours = our_logits(run, tokens)
    if not options:  # PEFT refuses to begin so with rsLoRA and patterns, but takes what was converted
        assert_logits_equal(ours, oracles.transformers_logits(model, tokens, adapter=run.adapter))
    export(ExportConfig(run=run.path, to=tmp_path / "merged"))
    assert_logits_equal(ours, oracles.transformers_logits(tmp_path / "merged", tokens))
    export(ExportConfig(run=run.path, to=tmp_path / "adapter", format="adapter"))
    assert_logits_equal(ours, oracles.transformers_logits(model, tokens, adapter=tmp_path / "adapter"))
    _, config = read_adapter(tmp_path / "adapter")
    assert (config.r, config.rank_pattern, config.init_lora_weights) == (8, {"down_proj": 6}, True)


@pytest.mark.parametrize("kind", ["pissa", "loftq"])
def test_over_quantised_weights_a_dequantised_export_is_what_was_trained(tmp_path, model, kind):
    run = run_of(tmp_path / "run", model, lora_of(kind), "nf4")
    tokens = np.random.default_rng(1).integers(0, 320, (1, 120))
    ours = our_logits(run, tokens)
    export(ExportConfig(run=run.path, to=tmp_path / "merged", base="dequantized"))
    assert_logits_equal(ours, oracles.transformers_logits(tmp_path / "merged", tokens))
    export(ExportConfig(run=run.path, to=tmp_path / "alone", format="adapter"))
    if kind == "loftq":  # it stands beside weights that are quantised alike
        alone = oracles.transformers_logits(model, tokens, adapter=tmp_path / "alone", quantization="nf4")
        assert_logits_equal(ours, alone)
        assert "load the base model in nf4" in (tmp_path / "alone" / "README.md").read_text()


def test_the_weights_original_get_what_training_changed(tmp_path, model):
    """W + s (B A - B0 A0), whatever was quantised."""
    run = run_of(tmp_path / "run", model, lora_of("loftq"), "nf4")
    export(ExportConfig(run=run.path, to=tmp_path / "merged"))
    found, source = (read_header(folder / "model.safetensors") for folder in (tmp_path / "merged", model))
    name = "model.layers.0.self_attn.q_proj.weight"
    (now, _), (before, _) = read_adapter(run.adapter), read_adapter(run.initial_adapter)
    change = 2 * (product(now, name) - product(before, name))
    np.testing.assert_allclose(read_tensor(found[name]), read_tensor(source[name]) + change, atol=1e-6)


def test_an_adapter_as_it_began_is_not_exported(tmp_path, model):
    run = run_of(tmp_path / "run", model, lora_of("pissa"))
    tensors, config = read_adapter(run.initial_adapter)
    write_adapter(run.adapter, tensors, config)
    with pytest.raises(UserError, match="is as before training"):
        export(ExportConfig(run=run.path, to=tmp_path / "merged"))


def test_a_run_begins_so_and_goes_on_the_same(tmp_path, model):
    import runs

    from zagora_jax.trainer import train

    rows = runs.write_rows(tmp_path / "rows.jsonl", 8)
    options = {"lora": lora_of("pissa"), "max_steps": 2, "save_every": 1, "keep_checkpoints": 3}
    config = runs.tiny_config(model, tmp_path / "run", rows, **options)
    train(config, runs.recorder()[0])
    initial, _ = read_adapter(tmp_path / "run" / "initial_adapter")
    _, _, expected = begun(model, lora_of("pissa"), "nf4")
    assert initial.keys() == peft_shapes(open_tuned(tmp_path / "run").base.model).keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(initial[name], tensor, atol=1e-5)
    weights = tmp_path / "run" / "adapter" / "adapter_model.safetensors"
    unbroken = weights.read_bytes()
    resumed = config.model_copy(update={"resume": tmp_path / "run" / "checkpoints" / "1"})
    train(resumed, runs.recorder()[0])
    assert weights.read_bytes() == unbroken


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": {"initialization": "loftq"}, "quantization": "none"}, "quantization none loses nothing"),
        ({"lora": {"initialization": "pissa", "use_dora": True}}, "pissa does not go with use_dora"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig.model_validate({"model": "m", "data": ["rows.jsonl"]} | options)


def test_an_adapter_of_pissa_is_not_gone_on_with(tmp_path, model):
    from zagora_jax.adapter import with_adapters_options

    run = run_of(tmp_path / "run", model, lora_of("pissa"))
    with pytest.raises(UserError, match="init_lora_weights 'pissa'"):
        with_adapters_options(TrainConfig(model=str(model), data=["rows.jsonl"], adapter=run.adapter))
