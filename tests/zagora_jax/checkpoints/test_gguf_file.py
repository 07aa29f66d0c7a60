import os
import struct

import ml_dtypes
import numpy as np
import pytest
from checkpoint_builders import llama_tensors, write_gguf
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize

from zagora_jax.checkpoints import gguf_file
from zagora_jax.checkpoints.gguf_file import read_gguf
from zagora_jax.errors import UserError


def can_dequantize(kind):
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except (NotImplementedError, KeyError):
        return False
    return True


SUPPORTED = [kind for kind in GGMLQuantizationType if can_dequantize(kind)]
QUANTISED = [kind for kind in SUPPORTED if kind.name not in ("F32", "F16", "BF16")]


def write_one(path, data, kind, edit=lambda writer: None, **more):
    writer = GGUFWriter(path, "llama")
    edit(writer)
    writer.add_tensor("w", data, raw_dtype=kind, **more)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_usual_types_are_among_the_supported():
    names = {kind.name for kind in SUPPORTED}
    assert names >= {
        "F32",
        "F16",
        "BF16",
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
    }
    assert names >= {"IQ2_XXS", "IQ4_NL", "IQ4_XS", "TQ1_0", "MXFP4"}


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_quantised_rows_equal_the_librarys_dequantisation(tmp_path, monkeypatch, kind):
    # Random blocks, with scales kept finite by clearing the exponent's top bit of every half; several chunks.
    monkeypatch.setattr(gguf_file, "_CHUNK_ELEMENTS", 3 * 512)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (8, 512 // block * block_bytes), np.uint8) & 0xBF
    file = read_gguf(write_one(tmp_path / "x.gguf", data, kind))
    with np.errstate(invalid="ignore", over="ignore"):
        expected = dequantize(data, kind).astype(ml_dtypes.bfloat16)
    assert file.tensors["w"].shape == expected.shape == (8, 512)
    assert np.isfinite(expected.astype(np.float32)).mean() > 0.5
    assert file.read_rows("w", 0, 8).dtype == ml_dtypes.bfloat16
    assert file.read_rows("w", 0, 8).tobytes() == expected.tobytes()
    assert file.read_rows("w", 2, 7).tobytes() == expected[2:7].tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_unquantised_tensors_keep_their_dtype(tmp_path, dtype):
    kinds = {np.float32: "F32", np.float16: "F16", ml_dtypes.bfloat16: "BF16"}
    values = np.arange(-6, 6, dtype=np.float32).reshape(4, 3).astype(dtype)
    stored = values.view(np.uint8) if dtype is ml_dtypes.bfloat16 else values
    file = read_gguf(write_one(tmp_path / "x.gguf", stored, GGMLQuantizationType[kinds[dtype]]))
    assert file.read_rows("w", 0, 4).dtype == dtype
    np.testing.assert_array_equal(file.read_rows("w", 1, 3), values[1:3])


def test_metadata_equals_the_librarys_reading(tmp_path):
    def edit(writer):
        unsigned = {"uint8": 200, "uint16": 60000, "uint32": 1 << 31, "uint64": 1 << 40}
        signed = {"int8": -3, "int16": -300, "int32": -70000, "int64": -(1 << 40)}
        others = {"float32": 0.5, "float64": 1e-300, "bool": True}
        for name, value in (unsigned | signed | others).items():
            getattr(writer, f"add_{name}")(f"x.{name}", value)
        writer.add_string("x.text", "é\n")
        writer.add_array("x.texts", ["a", "", "日本"])
        writer.add_array("x.numbers", [1, -2, 3])
        writer.add_array("x.floats", [0.5, 1.5])
        writer.add_array("x.flags", [True, False])

    path = write_gguf(tmp_path / "x.gguf", edit=edit)
    reader = GGUFReader(path)
    file = read_gguf(path)
    theirs = {key: entry.contents() for key, entry in reader.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata == theirs
    assert {key: type(value) for key, value in file.metadata.items()} == {key: type(v) for key, v in theirs.items()}
    for tensor in reader.tensors:
        assert file.tensors[tensor.name].shape == tuple(reversed(tensor.shape.tolist()))
        assert file.tensors[tensor.name].offset == tensor.data_offset
        assert file.tensors[tensor.name].nbytes == tensor.n_bytes


def test_alignment_is_followed(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", edit=lambda writer: writer.add_custom_alignment(256))
    file = read_gguf(path)
    assert all(tensor.offset % 256 == 0 for tensor in file.tensors.values())
    embedding = llama_tensors()["model.embed_tokens.weight"]
    np.testing.assert_array_equal(file.read_rows("token_embd.weight", 0, 128), embedding)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no GGUF file"),
        (b"GGML....", "no GGUF file: it begins with b'GGML'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"GGUF" + struct.pack("<I", 1), "version 1"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
        (b"GGUF\3\0", "cut off or damaged: the version"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "no tensors"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60), "a metadata key at byte"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff" + bytes(8), "not UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 99), "unknown value type 99"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 1 << 60), "claims .* strings"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 0, 1 << 60), "cut off or damaged: k"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "array of arrays"),
        (b"GGUF" + struct.pack("<IQQQ1sIBQ1sIB", 3, 0, 2, 1, b"k", 0, 1, 1, b"k", 0, 1), "'k' stands twice"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"w", 9), "has 9 dimensions"),
        (b"GGUF" + struct.pack("<IQQQ1sI3QIQ", 3, 1, 0, 1, b"w", 3, 2, 2, 2, 0, 0), "vectors and matrices only"),
        (b"GGUF" + struct.pack("<IQQQ1sI2QIQ", 3, 1, 0, 1, b"w", 2, 0, 2, 0, 0), "vectors and matrices only"),
        (b"GGUF" + struct.pack("<IQQQ1sI2QIQ", 3, 1, 0, 1, b"w", 2, 2, 2, 999, 0), "type 999"),
        (b"GGUF" + struct.pack("<IQQQ1sI2QIQ", 3, 1, 0, 1, b"w", 2, 2, 2, 26, 0), "stored as I32, which"),
        (b"GGUF" + struct.pack("<IQQQ1sI2QIQ", 3, 1, 0, 1, b"w", 2, 31, 2, 2, 0), "Q4_0 blocks of 32"),
        (b"GGUF" + struct.pack("<IQQQ1sI2QIQ", 3, 1, 0, 1, b"w", 2, 2, 2, 0, 0), "is cut off: expected at least"),
        (b"GGUF" + struct.pack("<IQQQ1sI2QIQ", 3, 1, 0, 1, b"w", 2, 2, 2, 0, 1) + bytes(99), "misaligned"),
        (b"GGUF" + struct.pack("<IQQ" + "Q1sI2QIQ" * 2, 3, 2, 0, *(1, b"w", 2, 2, 2, 0, 0) * 2), "stands twice"),
    ],
)
def test_damaged_files_are_refused(tmp_path, content, message):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


def test_a_cut_file_says_what_was_expected(tmp_path):
    path = write_gguf(tmp_path / "x.gguf")
    size = path.stat().st_size
    os.truncate(path, size - 100)
    with pytest.raises(UserError, match=f"found {size - 100:,}"):
        read_gguf(path)


def test_parts_of_a_split_model_are_refused(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", edit=lambda writer: writer.add_uint16("split.count", 3))
    with pytest.raises(UserError, match="one of 3 parts"):
        read_gguf(path)
