import json
import os

import ml_dtypes
import numpy as np
import pytest
from checkpoint_builders import CONFIG

from zagora_jax.checkpoints import AdapterConfig, read_adapter, write_adapter
from zagora_jax.errors import UserError

MODULES = [f"model.layers.{layer}.self_attn.{part}" for layer in range(2) for part in ("q_proj", "v_proj")]
LORA = AdapterConfig(r=4, lora_alpha=8.0, lora_dropout=0.05, target_modules=("q_proj", "v_proj"))


def adapter_tensors(dtype=np.float32, rank=4):
    generator = np.random.default_rng(0)
    tensors = {}
    for module in MODULES:
        rows = 64 if "q_proj" in module else 32
        for side, shape in (("A", (rank, 64)), ("B", (rows, rank))):
            # multiples of 1/8: exact in every dtype
            values = generator.integers(-16, 17, shape) / 8
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = values.astype(dtype)
    return tensors


def edit_config(folder, **changes):
    content = json.loads((folder / "adapter_config.json").read_text()) | changes
    (folder / "adapter_config.json").write_text(json.dumps(content))


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].dtype == expected[name].dtype
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_what_is_written_is_read(tmp_path, dtype):
    tensors = adapter_tensors(dtype)
    write_adapter(tmp_path / "new" / "adapter", tensors, LORA, modules=MODULES, trained=True)
    found, config = read_adapter(tmp_path / "new" / "adapter")
    assert config == LORA
    assert_equal(found, tensors)
    assert sorted(os.listdir(tmp_path / "new" / "adapter")) == ["adapter_config.json", "adapter_model.safetensors"]


def test_scale():
    assert LORA.scale == 2.0
    assert AdapterConfig(r=4, lora_alpha=8, target_modules="x", use_rslora=True).scale == 4.0


def test_equal_adapters_have_equal_bytes(tmp_path):
    for name in "ab":
        write_adapter(tmp_path / name, adapter_tensors(), LORA)
    for file in os.listdir(tmp_path / "a"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def empty(tensors):
    tensors.clear()


def unpaired(tensors):
    del tensors[f"base_model.model.{MODULES[1]}.lora_B.weight"]


def misnamed(tensors):
    tensors["model.lora_A.default.weight"] = np.ones((4, 64), np.float32)


def zero_size(tensors):
    tensors[f"base_model.model.{MODULES[0]}.lora_B.weight"] = np.zeros((0, 4), np.float32)


def other_rank(tensors):
    tensors[f"base_model.model.{MODULES[0]}.lora_A.weight"] = np.zeros((8, 64), np.float32)


def transposed(tensors):
    tensors[f"base_model.model.{MODULES[0]}.lora_B.weight"] = np.zeros((4, 64), np.float32)


def integer(tensors):
    tensors[f"base_model.model.{MODULES[0]}.lora_B.weight"] = np.ones((64, 4), np.int32)


def untrained(tensors):
    for name, tensor in tensors.items():
        if "lora_B" in name:
            tensor[:] = 0


def fewer(tensors):
    for side in "AB":
        del tensors[f"base_model.model.{MODULES[1]}.lora_{side}.weight"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (empty, "it has no tensors"),
        (unpaired, r"v_proj\.lora_A\.weight' is there without"),
        (misnamed, r"'model\.lora_A\.default\.weight' is not named"),
        (zero_size, r"has the shape \[0, 4\], expected \[out, 4\]"),
        (other_rank, r"has the shape \[8, 64\], expected \[4, in\]"),
        (transposed, r"has the shape \[4, 64\], expected \[out, 4\]"),
        (integer, "has the dtype int32"),
        (fewer, r"expected 4 modules, found 3; model\.layers\.0\.self_attn\.v_proj"),
    ],
)
def test_a_broken_adapter_is_not_saved(tmp_path, damage, message):
    tensors = adapter_tensors()
    damage(tensors)
    with pytest.raises(ValueError, match=message):
        write_adapter(tmp_path / "adapter", tensors, LORA, modules=MODULES, trained=True)
    assert not (tmp_path / "adapter").exists()


def test_an_adapter_may_be_zero_before_training_alone(tmp_path):
    tensors = adapter_tensors()
    untrained(tensors)
    with pytest.raises(UserError, match="adapter: the adapter is not saved: every B is zero after training"):
        write_adapter(tmp_path / "adapter", tensors, LORA, trained=True)
    assert not (tmp_path / "adapter").exists()
    write_adapter(tmp_path, tensors, LORA)
    assert_equal(read_adapter(tmp_path)[0], tensors)


def test_a_failed_write_leaves_the_adapter_before(tmp_path, monkeypatch):
    write_adapter(tmp_path, adapter_tensors(), LORA)

    def fail(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    changed = {name: tensor + 1 for name, tensor in adapter_tensors().items()}
    with pytest.raises(OSError, match="disk full"):
        write_adapter(tmp_path, changed, LORA)
    assert_equal(read_adapter(tmp_path)[0], adapter_tensors())
    assert len(os.listdir(tmp_path)) == 2


def test_what_reads_back_differently_fails_loudly(tmp_path, monkeypatch):
    from zagora_jax.checkpoints import peft

    monkeypatch.setattr(peft, "read_tensor", lambda info: np.zeros(info.shape, info.dtype))
    with pytest.raises(RuntimeError, match="reads back differently"):
        write_adapter(tmp_path, adapter_tensors(), LORA)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bias", "all"),
        ("use_dora", "yes"),
        ("rank_pattern", {"q_proj": 0}),
        ("alpha_pattern", {"q_proj": None}),
        ("rank_pattern:", {"(": 1}),
        ("modules_to_save", "lm_head"),
        ("trainable_token_indices", [1]),
        ("layers_to_transform", [-1]),
        ("layers_pattern", "blocks"),
        ("fan_in_fan_out", True),
        ("lora_bias", True),
        ("exclude_modules", ["v_proj"]),
        ("target_parameters", ["x"]),
        ("init_lora_weights", "olora"),
        ("a_field_of_tomorrow", 3),
    ],
)
def test_unsupported_fields_are_refused_by_name(tmp_path, field, value):
    write_adapter(tmp_path, adapter_tensors(), LORA)
    edit_config(tmp_path, **{field.strip(":"): value})
    with pytest.raises(UserError, match=rf"adapter_config\.json: {field} "):
        read_adapter(tmp_path)


def test_tensors_that_a_pattern_or_dora_asks_for_are_required(tmp_path):
    write_adapter(tmp_path, adapter_tensors(), LORA)
    edit_config(tmp_path, use_dora=True)
    with pytest.raises(UserError, match=r"is there without '.*lora_magnitude_vector'"):
        read_adapter(tmp_path)
    edit_config(tmp_path, use_dora=False, rank_pattern={"q_proj": 7})
    with pytest.raises(UserError, match=r"lora_A.weight' has the shape \[4, 64\], expected \[7, in\]"):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "found IA3 for CAUSAL_LM"),
        ({"task_type": "SEQ_CLS"}, "found LORA for SEQ_CLS"),
        ({"r": "4"}, "r must be int, found '4'"),
        ({"r": True}, "r must be int, found True"),
        ({"r": 0}, "expected r >= 1"),
        ({"lora_alpha": None}, "lora_alpha must be int or float"),
        ({"lora_alpha": float("inf")}, "lora_alpha inf"),
        ({"target_modules": None}, "target_modules must be str or list"),
        ({"r": 8}, r"expected \[8, in\]|expected \[out, 8\]"),
    ],
)
def test_malformed_configs_are_refused(tmp_path, changes, message):
    write_adapter(tmp_path, adapter_tensors(), LORA)
    edit_config(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        read_adapter(tmp_path)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"is no PEFT adapter: it holds no adapter_config\.json"):
        read_adapter(tmp_path)
    write_adapter(tmp_path, adapter_tensors(), LORA)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(UserError, match=r"holds no adapter_model\.safetensors\. Found adapter_model\.bin"):
        read_adapter(tmp_path)


@pytest.fixture
def tiny_llama():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))


@pytest.mark.parametrize("use_rslora", [False, True])
def test_peft_loads_what_is_written_and_applies_the_same_scale(tmp_path, tiny_llama, use_rslora):
    peft = pytest.importorskip("peft")
    tensors = adapter_tensors()
    config = AdapterConfig(r=4, lora_alpha=8, target_modules=("q_proj", "v_proj"), use_rslora=use_rslora)
    write_adapter(tmp_path, tensors, config)
    base = {name: p.detach().clone() for name, p in tiny_llama.named_parameters()}
    merged = peft.PeftModel.from_pretrained(tiny_llama, tmp_path).merge_and_unload()
    state = merged.state_dict()
    for module in MODULES:
        a, b = (tensors[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
        delta = (state[f"{module}.weight"] - base[f"{module}.weight"]).numpy()
        # B @ A is of order 10 and rounded to float32 a few times, then again at each addition to the weight.
        np.testing.assert_allclose(delta, config.scale * (b @ a), atol=1e-4)


def test_an_adapter_that_peft_saves_is_read(tmp_path, tiny_llama):
    peft = pytest.importorskip("peft")
    theirs = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.05, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_llama, theirs)
    model.save_pretrained(tmp_path)
    tensors, config = read_adapter(tmp_path)
    assert (config.r, config.lora_alpha, config.lora_dropout, config.target_modules) == (4, 8, 0.05, ("q_proj",))
    state = peft.get_peft_model_state_dict(model)
    assert_equal(tensors, {name: tensor.numpy() for name, tensor in state.items()})
