import io

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from zagora_jax.checkpoints.safetensors_file import read_header, read_tensor
from zagora_jax.checkpoints.safetensors_writer import write_safetensors

TENSORS = {
    "odd": np.arange(3, dtype=ml_dtypes.bfloat16),
    "é matrix": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "half": np.ones((1, 1), np.float16),
}
SPECS = {name: (tensor.shape, tensor.dtype) for name, tensor in TENSORS.items()}


def test_the_library_reads_it(tmp_path):
    path = tmp_path / "x.safetensors"
    with open(path, "wb") as file:
        write_safetensors(file, SPECS, TENSORS.__getitem__, {"format": "pt"})
    with safetensors.safe_open(path, "np") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert set(opened.keys()) == set(TENSORS)
        np.testing.assert_array_equal(opened.get_tensor("é matrix"), TENSORS["é matrix"])
    header = read_header(path)
    for name, info in header.items():
        assert info.offset % info.dtype.itemsize == 0
        np.testing.assert_array_equal(read_tensor(info), TENSORS[name])


def test_tensors_are_asked_for_one_at_a_time():
    asked = []
    file = io.BytesIO()

    def read(name):
        asked.append((name, file.tell()))
        return TENSORS[name]

    write_safetensors(file, SPECS, read, {})
    positions = [position for _, position in asked]
    assert positions == sorted(set(positions))
    assert file.tell() == positions[-1] + TENSORS[asked[-1][0]].nbytes


def test_another_shape_than_promised_is_refused():
    with pytest.raises(ValueError, match="'é matrix': expected"):
        write_safetensors(io.BytesIO(), SPECS, lambda name: TENSORS["half"].ravel(), {})
