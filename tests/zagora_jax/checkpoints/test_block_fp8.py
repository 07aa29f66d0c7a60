"""Weights in float8 with a scale a block."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from oracles import tiny_llama

from zagora_jax.checkpoints.source import open_checkpoint
from zagora_jax.errors import UserError

NAME = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def fp8(tmp_path):
    """Writes a model whose q_proj [130, 130] is float8: its last blocks of [128, 128] are partial."""

    def write(block=(128, 128), scales_shape=(2, 2), method="fp8"):
        model = tiny_llama(
            tmp_path / "model", hidden_size=130, num_attention_heads=1, num_key_value_heads=1, tokenizer=False
        )
        tensors = safetensors.numpy.load_file(model / "model.safetensors")
        rng = np.random.default_rng(0)
        tensors[NAME] = (rng.standard_normal((130, 130)) * 100).astype(ml_dtypes.float8_e4m3fn)
        if scales_shape:
            tensors[f"{NAME}_scale_inv"] = rng.uniform(1e-4, 1e-3, scales_shape).astype(np.float32)
        safetensors.numpy.save_file(tensors, model / "model.safetensors")
        fields = {"quant_method": method, "weight_block_size": None if block is None else list(block)}
        config = json.loads((model / "config.json").read_text()) | {"quantization_config": fields}
        (model / "config.json").write_text(json.dumps(config))
        return model, tensors

    return write


def test_each_number_is_multiplied_by_its_blocks_scale(fp8):
    model, tensors = fp8()
    values, scales = tensors[NAME].astype(np.float32), tensors[f"{NAME}_scale_inv"]
    expected = np.array(
        [[values[row, column] * scales[row // 128, column // 128] for column in range(130)] for row in range(130)]
    ).astype(ml_dtypes.bfloat16)
    checkpoint = open_checkpoint(str(model))
    np.testing.assert_array_equal(checkpoint.read(NAME), expected, strict=True)
    np.testing.assert_array_equal(checkpoint.read_rows(NAME, 126, 129), expected[126:129], strict=True)
    assert f"{NAME}_scale_inv" not in checkpoint.tensors
    assert checkpoint.format_of(NAME) is None  # so it is quantised like any 16-bit weight


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scales_shape": None}, r"needs its scales .*_scale_inv, float32\[2, 2\], found nothing"),
        ({"scales_shape": (1, 2)}, r"float32\[2, 2\], found float32\[1, 2\]"),
        ({"block": None}, "weight_block_size is None"),
        ({"block": (128,)}, r"weight_block_size is \[128\]"),
        ({"method": "compressed-tensors"}, "quant_method is 'compressed-tensors'"),
    ],
)
def test_what_cannot_be_read_is_refused(fp8, options, message):
    model, _ = fp8(**options)
    with pytest.raises(UserError, match=message):
        open_checkpoint(str(model))
