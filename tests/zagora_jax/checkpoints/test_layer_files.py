"""A layer's file in the cache, read into memory that devices share out."""

from __future__ import annotations

import os

import numpy as np
import oracles
import pytest

from zagora_jax.base import open_base
from zagora_jax.checkpoints import read_ahead
from zagora_jax.checkpoints.layer_files import LayerFile, shares
from zagora_jax.checkpoints.reading import DamagedCacheError
from zagora_jax.checkpoints.safetensors_file import read_tensor

CODES, SCALES = (f"model.layers.1.mlp.down_proj.weight.{field}" for field in ("codes", "absmax"))
START = 256  # of the scales, in a row


@pytest.fixture
def layer(tmp_path, monkeypatch):
    """The second layer of a cache whose arrays are in several pieces, and its bytes."""
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 1000)
    folder = oracles.tiny_llama(tmp_path / "m", tokenizer=False)
    base = open_base(str(folder), quantization="nf4", dtype="float32", lora=None, quantized_cache=tmp_path / "cache")
    base.load(fill_cache=True)
    found = base.open_cache().found[1]
    assert len(found.byte_pieces(CODES)) > 2
    return found, {name: read_tensor(found.arrays[name]).reshape(-1).view(np.uint8) for name in (CODES, SCALES)}


def read(layer, sizes, share_bytes, row_bytes):
    """Read both arrays into rows of three devices, of which the last two have the same share."""
    rows = {0: [np.zeros(row_bytes, np.uint8)], 1: [np.zeros(row_bytes, np.uint8) for _ in range(2)]}
    places = {CODES: shares(sizes[CODES], share_bytes, START), SCALES: shares(sizes[SCALES], START, 0)}
    file = LayerFile(layer, places)
    try:
        for job in file.jobs(rows):
            job()
    finally:
        file.close()
    return rows


def test_each_device_gets_its_share(layer):
    found, arrays = layer
    codes, scales = arrays[CODES], arrays[SCALES]
    half = len(codes) // 2 + 3  # the last share is not full
    rows = read(found, {name: len(array) for name, array in arrays.items()}, half, START + half)
    np.testing.assert_array_equal(rows[0][0][START:], codes[:half])
    for row in rows[1]:
        np.testing.assert_array_equal(row[START : START + len(codes) - half], codes[half:])
        assert not row[START + len(codes) - half :].any()
    assert len(scales) <= START
    np.testing.assert_array_equal(rows[0][0][: len(scales)], scales)


@pytest.mark.parametrize("damage", ["flipped", "truncated"])
def test_damage_is_noticed(layer, damage):
    found, arrays = layer
    sizes = {name: len(array) for name, array in arrays.items()}
    content = bytearray(found.path.read_bytes())
    if damage == "flipped":
        content[found.arrays[CODES].offset + 1500] ^= 1
        found.path.write_bytes(content)
    else:
        with found.path.open("r+b") as file:
            file.truncate(found.arrays[CODES].offset + 1500)
    with pytest.raises(DamagedCacheError, match=r"checksum of .*down_proj|expected more than its"):
        read(found, sizes, sizes[CODES], START + sizes[CODES])


def test_a_disk_that_fails_is_named(layer, monkeypatch):
    found, arrays = layer

    def fails(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    sizes = {name: len(array) for name, array in arrays.items()}
    with pytest.raises(DamagedCacheError, match=r"layer-00001\..*: cannot be read: Input/output error"):
        read(found, sizes, sizes[CODES], START + sizes[CODES])


def test_a_file_that_is_removed_is_read_to_the_end(layer):
    found, arrays = layer
    codes = arrays[CODES]
    row = np.zeros(len(codes), np.uint8)
    file = LayerFile(found, {CODES: shares(len(codes), len(codes), 0)})
    found.path.unlink()
    for job in file.jobs({0: [row]}):
        job()
    file.close()
    np.testing.assert_array_equal(row, codes)
