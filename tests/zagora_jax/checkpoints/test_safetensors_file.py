import json
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from checkpoint_builders import raw_safetensors

from zagora_jax.checkpoints.safetensors_file import read_header, read_rows, read_tensor
from zagora_jax.errors import UserError

F32 = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u1", "?", "c8"])
def test_reads_what_the_library_writes(tmp_path, dtype):
    tensors = {"a": np.arange(12).reshape(3, 4).astype(dtype), "b": np.arange(5)[::-1].astype(dtype)}
    safetensors.numpy.save_file(tensors, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    assert set(header) == {"a", "b"}
    for name, tensor in tensors.items():
        found = read_tensor(header[name])
        assert found.dtype == tensor.dtype
        np.testing.assert_array_equal(found, tensor)
    np.testing.assert_array_equal(read_rows(header["a"], 1, 3), tensors["a"][1:3])
    assert read_rows(header["a"], 2, 2).shape == (0, 4)


@pytest.mark.parametrize(
    ("torch_name", "dtype"),
    [("bfloat16", ml_dtypes.bfloat16), ("float8_e4m3fn", ml_dtypes.float8_e4m3fn)],
)
def test_reads_the_narrow_floats_that_torch_writes(tmp_path, torch_name, dtype):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    values = [1.5, -0.0625, 448.0, 0.0]
    save_file({"w": torch.tensor(values).to(getattr(torch, torch_name))}, tmp_path / "x.safetensors")
    found = read_tensor(read_header(tmp_path / "x.safetensors")["w"])
    assert found.dtype == dtype
    assert found.astype(np.float32).tolist() == values


def test_scalar(tmp_path):
    (tmp_path / "x").write_bytes(
        raw_safetensors({"s": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, np.float32(3).tobytes())
    )
    assert read_tensor(read_header(tmp_path / "x")["s"]) == np.float32(3)


GOOD = raw_safetensors({"w": F32}, bytes(16))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD[:-10], r"is cut off: expected \d+ bytes, found \d+"),
        (GOOD + bytes(7), r"has bytes after its last tensor: expected \d+ bytes, found \d+"),
        (raw_safetensors({}), "no tensors"),
        (raw_safetensors({"__metadata__": {"format": "pt"}}), "no tensors"),
        ((1000).to_bytes(8, "little") + b"{}", "its header needs 1,008 bytes, found 10"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "more than the format's limit"),
        (b"", "0 bytes are no safetensors file"),
        (b"1234", "4 bytes are no safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
        (raw_safetensors(b"[1]"), "expected a JSON object"),
        (raw_safetensors(b"{"), "not valid JSON"),
        (raw_safetensors(b"\xff{}"), "not valid JSON"),
        (raw_safetensors(b"[" * 100_000), "not valid JSON"),
        (raw_safetensors(('{"w":%s,"w":%s}' % ((json.dumps(F32),) * 2)).encode(), bytes(16)), "'w' stands twice"),
        (raw_safetensors({"w": 3}), "expected the fields dtype, shape and data_offsets"),
        (raw_safetensors({"w": F32 | {"more": 1}}, bytes(16)), "expected the fields"),
        (raw_safetensors({"w": F32 | {"dtype": "F4"}}, bytes(16)), "dtype 'F4' is not one of"),
        (raw_safetensors({"w": F32 | {"dtype": []}}, bytes(16)), "is not one of"),
        (raw_safetensors({"w": F32 | {"shape": [2, -2]}}, bytes(16)), "non-negative integers"),
        (raw_safetensors({"w": F32 | {"shape": [True, 4]}}, bytes(16)), "non-negative integers"),
        (raw_safetensors({"w": F32 | {"shape": [2.0, 2]}}, bytes(16)), "non-negative integers"),
        (raw_safetensors({"w": F32 | {"shape": [2**40, 2**40]}}, bytes(16)), "takes .* bytes, but data_offsets"),
        (raw_safetensors({"w": F32 | {"shape": [0, 2**70], "data_offsets": [0, 0]}}), "no elements"),
        (raw_safetensors({"w": F32 | {"shape": [2, 3]}}, bytes(16)), r"takes 24 bytes, but data_offsets \[0, 16\]"),
        (raw_safetensors({"w": F32 | {"data_offsets": [16, 0]}}, bytes(16)), "hold -16"),
        (raw_safetensors({"w": F32 | {"data_offsets": [0]}}, bytes(16)), "must be .begin, end."),
        (raw_safetensors({"w": F32 | {"data_offsets": [8, 24]}}, bytes(24)), "leaves a gap after the header"),
        (raw_safetensors({"v": F32, "w": F32 | {"data_offsets": [8, 24]}}, bytes(24)), "'w' overlaps tensor 'v'"),
        (raw_safetensors({"w": F32, "v": F32}, bytes(16)), "overlaps"),
        (raw_safetensors({"__metadata__": {"a": 1}, "w": F32}, bytes(16)), "__metadata__ must map"),
        (raw_safetensors({"__metadata__": [], "w": F32}, bytes(16)), "__metadata__ must map"),
    ],
)
def test_damaged_files_are_refused(tmp_path, content, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        read_header(tmp_path / "absent")
    with pytest.raises(UserError, match="is not a file"):
        read_header(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="is not a file"):
        read_header(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError):
        read_header(tmp_path / "loop")


def test_a_file_that_shrinks_is_noticed(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(GOOD)
    header = read_header(path)
    os.truncate(path, len(GOOD) - 4)
    with pytest.raises(UserError, match=r"ended while it was read: expected 16 bytes at .*, found 12"):
        read_tensor(header["w"])


def test_memory_is_bounded_by_one_tensor(tmp_path):
    # Eight sparse tensors of 64 MiB: reading all of them in turn may add one of them, and change, to the peak.
    size = 64 * 1024**2
    header = {
        f"w{i}": {"dtype": "U8", "shape": [1024, size // 1024], "data_offsets": [i * size, (i + 1) * size]}
        for i in range(8)
    }
    path = tmp_path / "large.safetensors"
    path.write_bytes(raw_safetensors(header))
    os.truncate(path, path.stat().st_size + 8 * size)
    program = """
import resource, sys
from pathlib import Path
from zagora_jax.checkpoints.safetensors_file import read_header, read_tensor
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
total = 0
for info in read_header(Path(sys.argv[1])).values():
    total += int(read_tensor(info)[0, 0]) + 1
assert total == 8
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1.25 * size
