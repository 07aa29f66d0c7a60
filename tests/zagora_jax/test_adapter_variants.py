"""Kinds of adapters against PEFT: logits, gradients, what is saved, and merged exports."""

import json

import numpy as np
import oracles
import pytest
from subjects import Subject, assert_gradients_equal, assert_logits_equal

from models.lora import initial_adapter
from models.parameters import by_path, split
from zagora_jax.adapter import (
    adapted_modules,
    open_adapter,
    peft_config,
    peft_shapes,
    save_adapter,
    with_adapters_options,
)
from zagora_jax.base import open_base
from zagora_jax.checkpoints.load import ONE_DEVICE
from zagora_jax.checkpoints.peft import read_adapter, write_adapter
from zagora_jax.errors import UserError
from zagora_jax.option_groups import LoraConfig
from zagora_jax.row_lengths import RowLengths

pytest.importorskip("torch")

VARIANTS = {
    "dora": {"use_dora": True},
    "ranks and alphas by pattern": {
        "rank_pattern": ["down_proj=2", "layers.0.self_attn.q_proj=6"],
        "alpha_pattern": ["layers.1.self_attn.q_proj=3"],
        "use_rslora": True,
    },
    "some layers": {"layers": [1]},
    "modules that differ between layers": {
        "targets": r"model\.layers\.(0\.self_attn\.q_proj|1\.mlp\.down_proj)",
        "use_dora": True,
    },
}


def lora_of(variant):
    return LoraConfig(**({"rank": 4, "alpha": 8, "targets": ["q_proj", "down_proj"]} | VARIANTS[variant]))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return oracles.tiny_llama(tmp_path_factory.mktemp("base") / "model")


def opened(model, lora, quantization="none"):
    return open_base(str(model), quantization=quantization, dtype="float32", lora=lora)


def random_tensors(base):
    """An adapter that does something, of the shapes that the model declares."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in sorted(peft_shapes(base.model).items()):
        if "magnitude" in name:
            tensors[name] = rng.uniform(0.8, 1.6, shape).astype(np.float32)  # rows of the tiny models are near 1 long
        else:
            tensors[name] = rng.standard_normal(shape, np.float32) * (0.05 if "lora_B" in name else shape[1] ** -0.5)
    return tensors


def written(directory, base, lora):
    """The adapter as we write it, which PEFT reads."""
    write_adapter(directory, random_tensors(base), peft_config(base.model, lora, "base"), trained=True)
    return directory


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients_are_those_of_peft(tmp_path, model, variant):
    lora = lora_of(variant)
    adapter = written(tmp_path / "adapter", opened(model, lora), lora)
    subject = Subject(model, adapter, lora)
    tokens = np.random.default_rng(0).integers(0, 320, (1, 120))
    assert_logits_equal(subject.logits(tokens), oracles.transformers_logits(model, tokens, adapter=adapter))
    batch = oracles.random_batch(0, (1, 2, 24), packed=True)
    theirs = oracles.peft_bnb_gradients(model, adapter, batch, quantization="none")
    assert_gradients_equal(subject.gradients(batch), theirs)


@pytest.mark.parametrize("variant", ["dora", "ranks and alphas by pattern"])
def test_what_is_saved_reads_back(tmp_path, model, variant):
    lora = lora_of(variant)
    base = opened(model, lora)
    first = open_adapter(written(tmp_path / "first", base, lora), base.model)
    save_adapter(tmp_path / "second", base.model, first, lora, "base", trained=True)
    assert read_adapter(tmp_path / "second")[1] == read_adapter(tmp_path / "first")[1]
    ours, theirs = read_adapter(tmp_path / "second")[0], read_adapter(tmp_path / "first")[0]
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, strict=True)


def test_what_lies_beyond_a_layers_rank_has_no_effect_and_no_gradient(tmp_path, model):
    import jax
    import jax.numpy as jnp
    from flax import nnx

    lora = lora_of("ranks and alphas by pattern")
    base = opened(model, lora)
    graph, frozen, declared = *split(base.model)[:2], split(base.model)[2]
    frozen = base.load()
    adapters = initial_adapter(declared, seed=0)
    a = dict(by_path(adapters))["model", "layers", "self_attn", "q_proj", "adapter", "lora_A"].get_value()
    assert a.shape == (2, 6, 64)
    assert not a[1, 4:].any()
    assert a[0, 4:].any()
    filled = jax.tree.map(lambda leaf: jnp.where(leaf == 0, 0.1, leaf), adapters)  # padding too
    tokens = jnp.arange(12)[None]

    @jax.jit
    @jax.value_and_grad
    def loss(adapters):
        model = nnx.merge(graph, frozen, adapters)
        return jnp.square(model.hidden_states(tokens, jnp.arange(12)[None], None, kernel="reference")).sum()

    value, gradient = loss(filled)
    gradients = {path[-3:]: np.asarray(v.get_value()) for path, v in by_path(gradient).items()}
    for name, padding in (("lora_A", np.s_[1, 4:]), ("lora_B", np.s_[1, :, 4:])):
        of_stack = gradients["q_proj", "adapter", name]
        assert not of_stack[padding].any()
        assert of_stack[1].any()
        assert of_stack[0, -1].any()
    emptied = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.at[1, 4:].set(9.0) if "q_proj" in str(path) and "lora_A" in str(path) else leaf, filled
    )
    assert loss(emptied)[0] == value


@pytest.mark.parametrize("quantization", ["nf4", "none"])
def test_magnitudes_begin_as_the_lengths_of_the_weights_rows(model, quantization):
    """So that the model begins as the base model: PEFT's initialisation over what is held."""
    lora = lora_of("dora")
    base = opened(model, lora, quantization)
    measured = RowLengths(ONE_DEVICE, base.model)
    base.load(destination=measured)
    adapters = initial_adapter(split(base.model)[2], 0, measured.of_modules)
    found = {".".join(path): np.asarray(v.get_value()) for path, v in by_path(adapters).items()}
    magnitudes = found["model.layers.mlp.down_proj.adapter.lora_magnitude_vector"]
    assert base.checkpoint is not None
    weight = base.checkpoint.read("model.layers.1.mlp.down_proj.weight")
    lengths = np.linalg.norm(weight, axis=1)
    assert magnitudes.shape == (2, 64, 1)
    np.testing.assert_allclose(magnitudes[1, :, 0], lengths, rtol=1e-5 if quantization == "none" else 0.05)
    if quantization == "nf4":
        assert (magnitudes[1, :, 0] != lengths).any()


@pytest.mark.parametrize("variant", ["dora", "ranks and alphas by pattern", "modules that differ between layers"])
def test_a_merged_export_is_the_adapted_model(tmp_path, model, variant):
    from zagora_jax.checkpoints.source import open_checkpoint
    from zagora_jax.commands import ExportConfig
    from zagora_jax.config import TrainConfig
    from zagora_jax.config_file import save_config
    from zagora_jax.exporter import export

    lora = lora_of(variant)
    run = tmp_path / "run"
    run.mkdir()
    config = TrainConfig(model=str(model), data=[run / "rows.jsonl"], lora=lora)
    save_config(config, run / "config.yaml")
    fingerprint = open_checkpoint(str(model)).fingerprint()
    (run / "report.json").write_text(
        json.dumps({"synthetic": False, "model_fingerprint": fingerprint, "options": config.model_dump(mode="json")})
    )
    base = opened(model, lora)
    written(run / "adapter", base, lora)
    result = export(ExportConfig(run=run, to=tmp_path / "out"))
    assert result.merge is not None
    assert result.merge.adapted == result.merge.changed == len(adapted_modules(base.model))
    tokens = np.random.default_rng(1).integers(0, 320, (1, 40))
    theirs = oracles.transformers_logits(model, tokens, adapter=run / "adapter")
    merged = oracles.transformers_logits(tmp_path / "out", tokens)
    assert np.abs(merged - theirs).max() <= 2e-4 * np.abs(theirs).max()


def test_another_adapters_ranks_are_refused(tmp_path, model):
    lora = lora_of("ranks and alphas by pattern")
    adapter = written(tmp_path / "adapter", opened(model, lora), lora)
    other = lora.model_copy(update={"alpha_pattern": None})
    with pytest.raises(UserError, match=r"layers.1.self_attn.q_proj was trained with rank 4, alpha 3, .* of 1.5; "):
        open_adapter(adapter, opened(model, other).model)
    with pytest.raises(UserError, match="does not fit the model: 0 tensors missing, 4 without a place"):
        open_adapter(adapter, opened(model, lora.model_copy(update={"layers": [1], "rank_pattern": None})).model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [2]}, "lora.layers names layer 2, but the model has 2, from 0"),
        ({"rank_pattern": ["v_proj=2"]}, "lora.rank_pattern: v_proj fits none of the adapted modules"),
    ],
)
def test_choices_that_fit_nothing_are_refused(model, options, message):
    lora = LoraConfig(rank=4, targets=["q_proj"], **options)
    with pytest.raises(UserError, match=message):
        opened(model, lora)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank_pattern": ["q_proj"]}, "expected NAME=NUMBER"),
        ({"rank_pattern": ["q_proj=0"]}, "expected NAME=NUMBER"),
        ({"rank_pattern": ["q_proj=1.5"]}, "expected NAME=NUMBER"),
        ({"alpha_pattern": ["(=2"]}, "expected a regular expression before the ="),
        ({"layers": [0], "targets": ".*q_proj"}, "layers does not go with targets that are one regular expression"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LoraConfig(**options)


def continued(model, adapter, **lora):
    from zagora_jax.config import TrainConfig

    return TrainConfig(model=str(model), data=["rows.jsonl"], adapter=adapter, lora=LoraConfig(**lora))


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_adapters_own_settings_become_the_options(tmp_path, model, variant):
    lora = lora_of(variant)
    adapter = written(tmp_path / "adapter", opened(model, lora), lora)
    found = with_adapters_options(continued(model, adapter)).lora
    targets = sorted(lora.targets) if isinstance(lora.targets, list) else lora.targets
    assert found == lora.model_copy(update={"targets": targets})
    assert with_adapters_options(continued(model, adapter, dropout=0.5, rank=4)).lora.dropout == 0.5
    with pytest.raises(UserError, match=r"--lora.rank is 5, but the adapter in .* has 4; leave the option out"):
        with_adapters_options(continued(model, adapter, rank=5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_alpha": -1}, "adapter_config.json: alpha: expected at least 1, found -1$"),
        ({"target_modules": "("}, 'adapter_config.json: targets: expected a regular expression .*, found "\\("$'),
    ],
)
def test_an_adapters_own_settings_are_refused_in_plain_words(tmp_path, model, changes, message):
    variant = next(iter(VARIANTS))
    adapter = written(tmp_path / "adapter", opened(model, lora_of(variant)), lora_of(variant))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=message):
        with_adapters_options(continued(model, adapter))


def test_training_goes_on_from_an_adapter(tmp_path):
    import runs

    from zagora_jax.trainer import train

    model = oracles.tiny_llama(tmp_path / "model")
    lora = lora_of("dora")
    base = opened(model, lora)
    adapter = written(tmp_path / "adapter", base, lora)
    rows = runs.write_rows(tmp_path / "rows.jsonl", 8)
    config = runs.tiny_config(
        model, tmp_path / "run", rows, lora=LoraConfig(), adapter=adapter, max_steps=1, learning_rate=1e-3
    )
    reporter, printed = runs.recorder()
    train(config, reporter)
    assert f"going on from {adapter}" in printed()
    before, after = read_adapter(adapter)[0], read_adapter(tmp_path / "run" / "adapter")[0]
    assert before.keys() == after.keys()
    for name, tensor in before.items():  # Adam's first step is the learning rate at most
        assert 0 < np.abs(after[name] - tensor).max() <= 1.01e-3, name
