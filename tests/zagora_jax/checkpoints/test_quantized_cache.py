"""The cache of quantised models: the same bits as a fresh load, whatever happens to its files or to the process."""

import json
import multiprocessing
import os
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import checkpoint_builders
import jax
import numpy as np
import oracles
import pytest
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file

from zagora_jax.base import open_base
from zagora_jax.checkpoints import cache_writer, read_ahead
from zagora_jax.checkpoints.huggingface import HuggingFaceCheckpoint
from zagora_jax.checkpoints.quantized_cache import QuantizedCache

LAYERS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Several files; biases; all weights of one shape, so that little is compiled, and no multiple of a block."""
    return oracles.tiny_llama(
        tmp_path_factory.mktemp("model") / "tiny",
        tokenizer=False,
        num_hidden_layers=LAYERS,
        hidden_size=20,
        intermediate_size=20,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_shard_size="30KB",
        attention_bias=True,
    )


def copied(model, tmp_path):
    return Path(shutil.copytree(model, tmp_path / "copy"))


def load(model, cache, *, quantization="nf4", dtype="bfloat16", embeddings="none"):
    """Load a model; returns its arrays and what was said, once all is written."""
    base = open_base(
        str(model),
        quantization=quantization,
        dtype=dtype,
        lora=None,
        embeddings=embeddings,
        quantized_cache=cache,
    )
    said: list[str] = []
    frozen = base.load(say=said.append)
    wait_for_writing()
    return jax.tree.leaves(frozen), "\n".join(said)


def wait_for_writing():
    for thread in threading.enumerate():
        if thread.name.startswith("quantized-cache"):
            thread.join()


def assert_same(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.dtype, ours.sharding) == (theirs.dtype, theirs.sharding)
        np.testing.assert_array_equal(np.asarray(ours).view(np.uint8), np.asarray(theirs).view(np.uint8))


def files(cache):
    return sorted(cache.glob("*/layer-*.safetensors"))


def quantised_layers(monkeypatch):
    """Record the layers that are read from the model's own files."""
    layers, read_rows = set(), HuggingFaceCheckpoint.read_rows

    def recorded(self, name, start, stop):
        if "layers" in name:
            layers.add(int(name.split(".")[2]))
        return read_rows(self, name, start, stop)

    monkeypatch.setattr(HuggingFaceCheckpoint, "read_rows", recorded)
    return layers


@pytest.mark.parametrize(("quantization", "dtype"), [("nf4", "bfloat16"), ("hqq", "float16"), ("int8", "float32")])
def test_the_second_start_has_the_same_bits_and_reads_no_layer_of_the_model(
    model, tmp_path, monkeypatch, quantization, dtype
):
    options = {"quantization": quantization, "dtype": dtype}
    fresh, said = load(model, None, **options)
    assert not said
    first, said = load(model, tmp_path, **options)
    (folder,) = tmp_path.iterdir()
    assert said == f"keeping 0.00 GiB of quantised layers for the next start in {folder}"
    assert len(files(tmp_path)) == LAYERS == len(list(folder.iterdir()))
    layers = quantised_layers(monkeypatch)
    second, said = load(model, tmp_path, **options)
    assert said == f"reading the quantised model from {folder}"
    assert not layers
    assert_same(first, fresh)
    assert_same(second, fresh)


def test_arrays_in_pieces_have_the_same_bits(model, tmp_path, monkeypatch):
    fresh, _ = load(model, None)
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 1000)
    first, _ = load(model, tmp_path)
    second, said = load(model, tmp_path)
    assert said.startswith("reading the quantised model")
    assert_same(first, fresh)
    assert_same(second, fresh)


def test_a_file_says_what_it_is_and_any_reader_of_safetensors_reads_it(model, tmp_path):
    load(model, tmp_path)
    path = files(tmp_path)[1]
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])["__metadata__"]
    assert (header["format_version"], header["quantization"], header["compute_dtype"]) == ("1", "nf4", "bfloat16")
    assert json.loads(header["settings"]) == {"revision": 1, "block": 64, "group": 256}
    assert header["source"] == str(model)
    assert load_file(path)["model.layers.1.mlp.up_proj.weight.codes"].shape == (20 * 20 // 2,)


def test_other_settings_have_entries_of_their_own(model, tmp_path):
    for quantization, dtype in (("nf4", "bfloat16"), ("nf4", "float32"), ("int8", "bfloat16")):
        load(model, tmp_path, quantization=quantization, dtype=dtype)
    assert len(list(tmp_path.iterdir())) == 3


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-5])


def spoil_header(path):
    path.write_bytes(path.read_bytes().replace(b"checksums", b"checkmate"))


def other_layer(path):
    shutil.copy(path.parent / path.name.replace("00003", "00002"), path)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (flip, "the checksum of model.layers.3."),
        (cut_off, "is cut off"),
        (spoil_header, "'checksums'"),
        (other_layer, "expected model.layers.3."),
    ],
)
def test_a_damaged_file_is_named_and_made_anew(model, tmp_path, monkeypatch, damage, problem):
    fresh, _ = load(model, tmp_path)
    content = files(tmp_path)[3].read_bytes()
    damage(files(tmp_path)[3])
    layers = quantised_layers(monkeypatch)
    found, said = load(model, tmp_path)
    assert_same(found, fresh)
    assert layers == {3}
    assert str(tmp_path) in said
    assert "layer-00003" in said
    assert problem in said
    assert files(tmp_path)[3].read_bytes() == content
    assert load(model, tmp_path)[1].startswith("reading the quantised model")


def test_a_copy_of_the_model_is_read_once_and_recognised(model, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first, _ = load(model, cache)
    other = copied(model, tmp_path)
    for file in other.glob("*.safetensors"):
        os.utime(file, ns=(1, 1))
    layers = quantised_layers(monkeypatch)
    load(other, cache)
    assert len(layers) == LAYERS
    assert len(list(cache.iterdir())) == 1
    assert {path.stat().st_nlink for path in files(cache)} == {2}  # each file has two names, and lies there once
    layers.clear()
    for folder in (model, other):
        assert_same(load(folder, cache)[0], first)
    assert not layers


def test_a_model_changed_deep_inside_is_quantised_anew(model, tmp_path):
    cache, model = tmp_path / "cache", copied(model, tmp_path)
    load(model, cache)
    layers = {path.name: path.read_bytes() for path in files(cache)}
    file = next(path for path in model.glob("*.safetensors") if any(".layers.2." in name for name in load_file(path)))
    data = bytearray(file.read_bytes())
    data[-1001] ^= 1  # within a tensor, of layer 2 or behind it, beyond what a fingerprint covers
    file.write_bytes(data)
    fresh, _ = load(model, None)
    for _ in range(2):
        found, said = load(model, cache)
        assert_same(found, fresh)
    assert said.startswith("reading the quantised model")
    # The outdated files are gone, those of layers that are as they were have a second name.
    assert LAYERS < len(files(cache)) < 2 * LAYERS
    assert set(layers) - {path.name for path in files(cache)}


def test_a_killed_start_goes_on_where_it_was(model, tmp_path, monkeypatch):
    fresh, _ = load(model, None)
    child = multiprocessing.get_context("spawn").Process(target=_load_and_die, args=(model, tmp_path, 40))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    written = {int(path.name[6:11]) for path in files(tmp_path)}
    assert 0 < len(written) < LAYERS
    layers = quantised_layers(monkeypatch)
    found, said = load(model, tmp_path)
    assert_same(found, fresh)
    assert layers == set(range(LAYERS)) - written
    assert f"reading {len(written)} of {LAYERS} layers" in said
    assert len(files(tmp_path)) == LAYERS


def _load_and_die(model, cache, tensors):
    """Load, and be killed after so many tensors, once the layers that are complete are written."""
    count, write = 0, cache_writer.write_layer
    monkeypatch = pytest.MonkeyPatch()
    begun, ended = [], []

    def slow(cache, layer, *arguments):
        write(cache, layer, *arguments)
        ended.append(layer)

    submit = cache_writer.CacheWriter._submit
    monkeypatch.setattr(
        cache_writer.CacheWriter,
        "_submit",
        lambda self, layer, *arguments: (begun.append(layer), submit(self, layer, *arguments)),
    )
    monkeypatch.setattr(cache_writer, "write_layer", slow)

    def on_tensor(_):
        nonlocal count
        count += 1
        if count == tensors:
            while len(ended) < len(begun):
                threading.Event().wait(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    base = open_base(str(model), quantization="nf4", dtype="bfloat16", lora=None, quantized_cache=cache)
    base.load(on_tensor)


def test_two_that_write_at_once_disturb_nobody(model, tmp_path):
    fresh, _ = load(model, None)
    with ThreadPoolExecutor(2) as pool:  # nothing tells the threads of one process from those of two
        for found, _ in pool.map(lambda _: load(model, tmp_path), range(2)):
            assert_same(found, fresh)
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.iterdir())) == LAYERS
    assert_same(load(model, tmp_path)[0], fresh)


def test_a_disk_that_is_too_small_is_said_once(model, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=cache_writer.RESERVE_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    fresh, _ = load(model, None)
    found, said = load(model, tmp_path)
    assert_same(found, fresh)
    assert said.startswith("the quantised model is not kept for the next start: it takes 0.00 GiB, and of the 2.00 GiB")
    assert len(said.splitlines()) == 1
    assert not files(tmp_path)


def test_a_disk_that_fills_up_is_said_once(model, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "the file")

    monkeypatch.setattr(cache_writer, "write_safetensors", full)
    fresh, _ = load(model, None)
    found, said = load(model, tmp_path)
    assert_same(found, fresh)
    assert said.count("warning: the file: No space left on device: the quantised model is not kept any further") == 1
    assert not files(tmp_path)


def test_a_folder_that_cannot_be_made_is_said(model, tmp_path):
    (tmp_path / "file").write_text("")
    _, said = load(model, tmp_path / "file" / "cache")
    assert said.startswith("the quantised model is not kept for the next start")
    assert "Not a directory" in said


def test_a_disk_slower_than_loading_never_holds_it_up(model, tmp_path, monkeypatch):
    go_on, write = threading.Event(), cache_writer.write_layer

    def blocked(*arguments):
        go_on.wait()
        write(*arguments)

    monkeypatch.setattr(cache_writer, "write_layer", blocked)
    monkeypatch.setattr(cache_writer, "WAITING_BYTES", 1)  # so that one layer waits at a time
    fresh, _ = load(model, None)
    base = open_base(str(model), quantization="nf4", dtype="bfloat16", lora=None, quantized_cache=tmp_path)
    said = []
    found = base.load(say=said.append)
    go_on.set()
    assert_same(jax.tree.leaves(found), fresh)
    assert said[-1].endswith(
        f"{LAYERS - 1} of {LAYERS} layers of the quantised model are left to be kept at the next start"
    )
    wait_for_writing()
    monkeypatch.undo()
    found, said = load(model, tmp_path)
    assert f"reading 1 of {LAYERS} layers" in said
    assert_same(found, fresh)
    assert len(files(tmp_path)) == LAYERS


def test_what_killed_processes_left_is_cleared_away(model, tmp_path):
    load(model, tmp_path)
    (folder,) = tmp_path.iterdir()
    files(tmp_path)[0].unlink()
    old, new = folder / ".layer-00000.a.tmp", folder / ".layer-00000.b.tmp"
    for path in (old, new):
        path.write_text("half")
    os.utime(old, (0, 0))
    load(model, tmp_path)
    assert {path.name for path in folder.iterdir()} == {new.name, *(path.name for path in files(tmp_path))}


def test_what_is_quantised_here_is_kept_whatever_the_files_are(tmp_path):
    model = checkpoint_builders.write_gguf(tmp_path / "model.gguf", kind=GGMLQuantizationType.Q8_0)
    base = open_base(str(model), quantization="nf4", dtype="bfloat16", lora=None)
    assert QuantizedCache.pays(base.checkpoint, base.quantization, base.model)


def test_unquantised_models_are_not_kept(model, tmp_path):
    _, said = load(model, tmp_path / "cache", quantization="none", embeddings="int8")
    assert not said
    assert not (tmp_path / "cache").exists()
