"""Opening a base model: what is declared, what it counts, and which modules get an adapter."""

import jax
import oracles
import pytest

from models.parameters import Adapter, Frozen, by_path, split
from models.quantization import is_quantized
from zagora_jax.adapter import adapted_modules
from zagora_jax.base import open_base
from zagora_jax.errors import UserError
from zagora_jax.option_groups import LoraConfig


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return oracles.tiny_llama(tmp_path_factory.mktemp("model"), num_hidden_layers=3)


def opened(directory, quantization="nf4", **lora):
    options = LoraConfig(rank=4, alpha=8, **lora) if lora else None
    return open_base(str(directory), quantization=quantization, dtype="bfloat16", lora=options)


def adapted(base):
    """The modules with an adapter, by the end of their names."""
    return {path[-3] for path in by_path(split(base.model)[2])}


def test_nothing_is_on_the_device_before_loading(directory):
    before = jax.live_arrays()  # held, so that none of another test dies meanwhile
    base = opened(directory, targets="all-linear")
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(split(base.model)[1:]))
    assert len(jax.live_arrays()) == len(before)


@pytest.mark.parametrize("quantization", ["nf4", "none"])
def test_what_is_loaded_is_what_was_declared(directory, quantization):
    base = opened(directory, quantization, targets="all-linear")
    _, declared, _ = split(base.model)
    frozen = base.load()
    assert jax.tree.structure(frozen) == jax.tree.structure(declared)
    described = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(declared)]
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(frozen)] == described
    assert {type(variable) for variable in by_path(frozen).values()} == {Frozen}
    assert {type(variable) for variable in by_path(split(base.model)[2]).values()} == {Adapter}


def test_every_dimension_has_a_logical_axis(directory):
    base = opened(directory, targets="all-linear")
    for state in split(base.model)[1:]:
        for path, variable in by_path(state).items():
            value, axes = variable.get_value(), variable.get_metadata("axes")
            fields = ("codes", "absmax", "nested_absmax", "offset")
            pairs = [(getattr(value, f), getattr(axes, f)) for f in fields] if is_quantized(value) else [(value, axes)]
            for leaf, names in pairs:
                assert len(names) == leaf.ndim, path
                assert (names[:1] == ("layers",)) == (path[:2] == ("model", "layers")), path


def test_counts(directory):
    base = opened(directory)
    assert base.tensor_count() == 3 + 3 * 9
    per_layer = 64 * 64 * 2 + 32 * 64 * 2 + 3 * 192 * 64 + 2 * 64
    assert base.parameter_count() == 2 * 320 * 64 + 64 + 3 * per_layer


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("all-linear", set(oracles.PROJECTIONS)),
        (["q_proj", "self_attn.v_proj"], {"q_proj", "v_proj"}),
        (r"model\.layers\.\d+\.mlp\.(up|down)_proj", {"up_proj", "down_proj"}),
    ],
)
def test_targets(directory, targets, expected):
    assert adapted(opened(directory, targets=targets)) == expected


@pytest.mark.parametrize(
    "targets", [r"model\.layers\.[01]\.mlp\.up_proj", ["layers.0.mlp.up_proj", "layers.1.mlp.up_proj"]]
)
def test_targets_of_some_layers(directory, targets):
    modules = list(adapted_modules(opened(directory, targets=targets).model))
    assert modules == ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["mlp"], "'mlp' names no linear module"),
        (["q_prj"], "the nearest is q_proj"),
    ],
)
def test_targets_that_fit_no_module_are_refused(directory, targets, message):
    with pytest.raises(UserError, match=message):
        opened(directory, targets=targets)


def test_a_config_that_fits_no_model_names_the_model(tmp_path):
    directory = oracles.tiny_llama(tmp_path / "tiny", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(config.replace('"silu"', '"relu"'))
    with pytest.raises(UserError, match=r"tiny: config\.json: hidden_act 'relu' is not supported"):
        opened(directory)


def test_more_layers_than_tensors_are_refused_at_once(tmp_path):
    directory = oracles.tiny_llama(tmp_path / "tiny", num_hidden_layers=1)
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(config.replace('"num_hidden_layers": 1', '"num_hidden_layers": 10000000000'))
    with pytest.raises(UserError, match="num_hidden_layers is 10000000000, but the files hold 12 tensors in all"):
        opened(directory)


def test_a_synthetic_model_says_so_and_has_no_tokenizer():
    base = opened("synthetic:smollm2-135m?layers=1")
    assert base.synthetic
    assert base.checkpoint is None
    with pytest.raises(UserError, match="synthetic weights have no tokenizer"):
        base.tokenizer()


def test_fingerprints_tell_bases_apart(directory, tmp_path):
    other = oracles.tiny_llama(tmp_path, num_hidden_layers=3, seed=1)
    names = [directory, other, "synthetic:smollm2-135m?layers=1", "synthetic:smollm2-135m?layers=2"]
    assert len({opened(name).fingerprint() for name in names}) == 4
    assert opened(directory).fingerprint() == opened(directory).fingerprint()
