"""Checkpoints that bitsandbytes has quantised, as transformers saves them, against bitsandbytes' own dequantisation."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracles
import pytest
import safetensors.numpy

from models.parameters import by_path
from models.quantization import dequantize
from zagora_jax.base import open_base
from zagora_jax.checkpoints.quantized_cache import QuantizedCache
from zagora_jax.checkpoints.source import open_checkpoint
from zagora_jax.errors import UserError

FORMATS = {"nf4": ("nf4", True), "nf4-single": ("nf4", False), "fp4": ("fp4", True), "fp4-single": ("fp4", False)}
STATE = "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4"


def bnb_model(directory, format):
    """A tiny model with odd shapes (a last block and a last group that are not full), saved by transformers."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    kind, double = FORMATS[format]
    source = oracles.tiny_llama(directory / "source", dtype="bfloat16", intermediate_size=129, tokenizer=False)
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double)
    network = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, quantization_config=options, device_map={"": "cpu"}
    )
    network.save_pretrained(directory / format)
    return directory / format


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bnb")
    return {format: bnb_model(folder, format) for format in FORMATS}


def tensors_of(directory):
    return safetensors.numpy.load_file(directory / "model.safetensors")


def dequantized(directory):
    """The linear weights as bitsandbytes dequantises the stored bytes, float32."""
    import bitsandbytes.functional as F
    import torch

    stored = {name: torch.from_numpy(t) for name, t in tensors_of(directory).items() if t.dtype != ml_dtypes.bfloat16}
    weights = {}
    for name in stored:
        if ".quant_state." in name:
            weight = name.partition(".quant_state.")[0]
            parts = {key.removeprefix(f"{weight}."): t for key, t in stored.items() if key.startswith(f"{weight}.")}
            state = F.QuantState.from_dict(parts, device=torch.device("cpu"))
            state.dtype = torch.float32
            # Flat, since the CPU kernel is wrong for matrices whose rows are no multiple of the block.
            shape, state.shape = state.shape, torch.Size([state.shape.numel()])
            weights[weight] = F.dequantize_4bit(stored[weight], state).reshape(shape).numpy()
    return weights


@pytest.mark.parametrize("format", FORMATS)
def test_weights_are_taken_as_they_are_stored(models, format):
    base = open_base(str(models[format]), quantization="nf4", dtype="float32", lora=None)
    assert not QuantizedCache.pays(base.checkpoint, base.quantization, base.model)  # the files are as good
    assert base.quantization == format
    frozen = {".".join(path): variable.get_value() for path, variable in by_path(base.load()).items()}
    stored, expected = tensors_of(models[format]), dequantized(models[format])
    assert len(expected) == 14
    assert base.checkpoint is not None
    for name, weight in expected.items():
        layer = int(name.split(".")[2])
        stack = frozen[name.replace(f"layers.{layer}.", "layers.")]
        ours = jax.tree.map(lambda leaf, layer=layer: leaf[layer], stack)
        np.testing.assert_array_equal(ours.codes, stored[name].reshape(-1))
        np.testing.assert_array_equal(ours.absmax, stored[f"{name}.absmax"])
        np.testing.assert_array_equal(np.asarray(dequantize(ours, jnp.float32)), weight, strict=True)
        # Read as a plain tensor, for an export, it is that rounded once; rows too, wherever blocks begin and end.
        rounded = weight.astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(base.checkpoint.read(name), rounded, strict=True)
        np.testing.assert_array_equal(base.checkpoint.read_rows(name, 3, 8), rounded[3:8], strict=True)
    np.testing.assert_array_equal(frozen["lm_head.weight"], stored["lm_head.weight"].astype(np.float32))


def test_they_can_be_held_dequantised(models):
    base = open_base(str(models["fp4"]), quantization="none", dtype="bfloat16", lora=None)
    frozen = {".".join(path): variable.get_value() for path, variable in by_path(base.load()).items()}
    expected = dequantized(models["fp4"])["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(
        np.asarray(frozen["model.layers.mlp.down_proj.weight"][1]), expected.astype(ml_dtypes.bfloat16)
    )


def rewritten(model, directory, change):
    """A copy of a model whose tensors `change` has changed."""
    directory.mkdir()
    tensors = tensors_of(model)
    change(tensors)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_bytes((model / "config.json").read_bytes())
    return directory


def with_state(**fields):
    def change(tensors):
        state = json.loads(tensors[STATE].tobytes()) | fields
        tensors[STATE] = np.frombuffer(json.dumps(state).encode(), np.uint8)

    return change


def without(name):
    return lambda tensors: tensors.pop(name)


def other_table(tensors):
    tensors["model.layers.0.mlp.up_proj.weight.quant_map"] = np.linspace(-1, 1, 16, dtype=np.float32)


def cut(tensors):
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"][:-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_state(blocksize=128), "blocksize is 128, expected 64"),
        (with_state(shape=[64]), r"shape must be \[out, in\], found \[64\]"),
        (with_state(dtype="int8"), "dtype is 'int8', expected 'bfloat16' or 'float16' or 'float32'"),
        (with_state(nested_offset=None), "nested_offset must be a number"),
        (without("model.layers.0.mlp.up_proj.weight.absmax"), r"up_proj.weight.absmax \(uint8\[129\]\) is missing"),
        (other_table, "quant_map is not the table that bitsandbytes uses for it"),
        (cut, r"expected 4,128 bytes of codes for \[129, 64\], found 4,127 bytes"),
        (without(STATE), "tensor 'model.layers.0.mlp.up_proj.weight' is stored as uint8"),
    ],
)
def test_what_does_not_fit_is_refused(models, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        open_checkpoint(str(rewritten(models["nf4"], tmp_path / "changed", change)))


def test_weights_that_were_left_in_16_bits_are_quantised_with_a_warning(models, tmp_path, caplog):
    def keep_one(tensors):
        name = "model.layers.0.mlp.up_proj.weight"
        for part in [key for key in tensors if key.startswith(name)]:
            del tensors[part]
        tensors[name] = np.zeros((129, 64), ml_dtypes.bfloat16)

    model = rewritten(models["nf4"], tmp_path / "mixed", keep_one)
    assert open_base(str(model), quantization="nf4", dtype="float32", lora=None).quantization == "nf4"
    assert "1 of 14 weights, first model.layers.0.mlp.up_proj.weight" in caplog.text
    model = rewritten(models["nf4-single"], tmp_path / "single", keep_one)
    with pytest.raises(UserError, match=r"1 of 14 weights, first .*, are not quantised, the others are nf4-single"):
        open_base(str(model), quantization="nf4", dtype="float32", lora=None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "8-bit weights .* cannot be read"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "no tensor is named like"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method is 'gptq'"),
        ({"quant_method": "awq", "bits": 4}, "quant_method is 'awq'"),
    ],
)
def test_other_methods_are_refused_by_name(tmp_path, fields, message):
    model = oracles.tiny_llama(tmp_path / "model", tokenizer=False)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": fields}))
    with pytest.raises(UserError, match=message):
        open_checkpoint(str(model))
