"""Merging tensor by tensor, against exact arithmetic in float64."""

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from checkpoint_builders import llama_tensors, raw_safetensors, write_gguf
from oracles import STORAGE, random_adapter, tiny_llama

from models.config import ModelConfig
from models.llama import Llama
from models.quantization import nf4
from zagora_jax.base import open_base
from zagora_jax.checkpoints import merge
from zagora_jax.checkpoints.load import expected_tensors
from zagora_jax.checkpoints.merge import Merge
from zagora_jax.checkpoints.merge_checks import Update
from zagora_jax.checkpoints.safetensors_file import read_header
from zagora_jax.errors import UserError
from zagora_jax.option_groups import LoraConfig

PREFIX = "base_model.model."

# Relative rounding error of the types: half a unit in the last place of a number with that many bits.
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def updates_of(tensors, scale=2.0):
    return {
        name.removeprefix(PREFIX).replace(".lora_A.weight", ".weight"): Update(
            a, tensors[name.replace("lora_A", "lora_B")], scale
        )
        for name, a in tensors.items()
        if "lora_A" in name
    }


def plan(directory, updates, targets="all-linear", **options):
    lora = LoraConfig(rank=4, alpha=8, targets=targets)  # scale 2
    base = open_base(str(directory), quantization="none", dtype="float32", lora=lora)
    assert base.checkpoint is not None
    return Merge(base.checkpoint, base.model, updates, **options)


def load(directory):
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in safetensors.numpy.load_file(file).items()
    }


@pytest.fixture(scope="module")
def bf16_model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("bf16") / "model", dtype="bfloat16")


@pytest.fixture
def out(tmp_path):
    directory = tmp_path / "out"
    directory.mkdir()
    return directory


@pytest.mark.parametrize("source", STORAGE)
@pytest.mark.parametrize("target", [None, *STORAGE])
def test_sums_are_rounded_once(tmp_path, out, source, target):
    model = tiny_llama(tmp_path / "model", dtype=source, attention_bias=True, tokenizer=False)
    updates = updates_of(random_adapter(model))
    report = plan(model, updates, dtype=None if target is None else STORAGE[target]).write(out)
    before, after = load(model), load(out)
    assert before.keys() == after.keys()
    written_dtype = target or source
    for name, tensor in before.items():
        exact = tensor.astype(np.float64)
        slack = np.zeros_like(exact)
        if name in updates:
            update = updates[name]
            b, a = update.b.astype(np.float64), update.a.astype(np.float64)
            exact += update.scale * (b @ a)
            # Rank 4: four products, three sums, one scaling and the sum with W, each in float32.
            slack = 9 * 2.0**-24 * (np.abs(tensor.astype(np.float64)) + update.scale * (np.abs(b) @ np.abs(a)))
        assert after[name].dtype == STORAGE[written_dtype]
        # float16 is spaced evenly below 2**-14.
        half_step = ROUNDING[written_dtype] * np.maximum(np.abs(exact), 2.0**-14 if written_dtype == "float16" else 0)
        assert (np.abs(after[name].astype(np.float64) - exact) <= half_step * 1.01 + slack).all(), name
        if name not in updates and written_dtype == source:
            assert after[name].tobytes() == tensor.tobytes()
    assert (report.tensors, report.adapted, report.changed) == (len(before), 14, 14)
    assert report.columns == 14 * 8
    assert report.share_of_bound <= 1
    # Rounding to bfloat16 takes part of an update of 10 % of the weights, float32 keeps it all.
    assert abs(report.share_kept - 1) < (1e-5 if written_dtype == "float32" else 0.05)


def test_additions_are_made_in_float32_and_rounded_to_bfloat16_once(tmp_path, out):
    """1 + 0.003 is nearer to 1, 1 + 0.004 to 1 + 2**-7."""
    model = tiny_llama(tmp_path / "model", dtype="bfloat16", tokenizer=False)
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)]
    ones = np.ones((64, 64), ml_dtypes.bfloat16)
    weights = load(model) | dict.fromkeys(names, ones)
    safetensors.numpy.save_file(weights, model / "model.safetensors", {"format": "pt"})
    a, b = np.zeros((4, 64), np.float32), np.zeros((64, 4), np.float32)
    a[0], b[:32, 0], b[32:, 0] = 0.5, 0.003, 0.004
    report = plan(model, dict.fromkeys(names, Update(a, b, 2.0)), targets=["q_proj"]).write(out)
    merged = load(out)[names[1]].astype(np.float32)
    assert (merged[:32] == 1).all()
    assert (merged[32:] == 1.0078125).all()
    # Of 0.003 nothing is kept and of 0.004 0.0078125; the projection weighs them by the update itself.
    assert report.share_kept == pytest.approx(0.0078125 * 0.004 / (0.003**2 + 0.004**2), rel=1e-4)


def test_dequantized_base(tmp_path, out):
    # One shape for all, which is compiled once; 60 * 60 is no multiple of the block, so that blocks span rows.
    square = {"hidden_size": 60, "head_dim": 30, "intermediate_size": 60, "num_key_value_heads": 2}
    model = tiny_llama(tmp_path / "model", dtype="bfloat16", tokenizer=False, num_attention_heads=2, **square)
    targets = ["q_proj", "down_proj"]
    updates = updates_of(random_adapter(model, targets=targets))
    report = plan(model, updates, targets, dequantized="nf4", dtype=np.dtype(np.float32)).write(out)
    before, after = load(model), load(out)
    for name, tensor in before.items():
        expected = tensor.astype(np.float32)
        if "_proj." in name:
            expected = np.asarray(nf4.dequantize(nf4.quantize(tensor), np.float32))
            assert (expected != tensor.astype(np.float32)).any()
        if name in updates:
            expected = expected + np.float32(2) * (updates[name].b @ updates[name].a)
        np.testing.assert_allclose(after[name], expected, rtol=1e-6, atol=1e-7, err_msg=name)
    assert (report.adapted, report.changed) == (4, 4)


def test_shards_are_named_and_filled_as_the_source(tmp_path, out):
    model = tiny_llama(tmp_path / "model", dtype="bfloat16", max_shard_size="60KB", tokenizer=False)
    merged = plan(model, updates_of(random_adapter(model)))
    merged.write(out)
    shards = sorted(path.name for path in model.glob("*.safetensors"))
    assert len(shards) > 3
    assert sorted(path.name for path in out.glob("*.safetensors")) == shards
    for shard in shards:
        assert read_header(out / shard).keys() == read_header(model / shard).keys()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    assert index["metadata"]["total_size"] == merged.total_bytes == sum(tensor.nbytes for tensor in load(out).values())


def test_one_file_has_no_index(bf16_model, out):
    plan(bf16_model, updates_of(random_adapter(bf16_model))).write(out)
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]


def test_a_gguf_source_is_written_in_shards_of_a_limited_size(tmp_path, out, monkeypatch):
    model = write_gguf(tmp_path / "model.gguf")
    shapes = {name: tensor.shape for name, tensor in llama_tensors().items()}
    rng = np.random.default_rng(0)
    updates = {
        name: Update(rng.standard_normal((4, width), np.float32), rng.standard_normal((out_size, 4), np.float32), 2.0)
        for name, (out_size, width) in ((name, shape) for name, shape in shapes.items() if "_proj" in name)
    }
    monkeypatch.setattr(merge, "SHARD_BYTES", 40_000)
    plan(model, updates).write(out)
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2
    for number, path in enumerate(files, start=1):
        assert path.name == f"model-{number:05d}-of-{len(files):05d}.safetensors"
        sizes = [info.nbytes for info in read_header(path).values()]
        assert sum(sizes) <= 40_000 or len(sizes) == 1
    expected = llama_tensors()
    for name, tensor in load(out).items():
        exact = expected.pop(name)
        if name in updates:
            exact = exact + 2 * (updates[name].b @ updates[name].a)
        np.testing.assert_allclose(tensor, exact, rtol=1e-5, atol=1e-5, err_msg=name)
    assert not expected


def test_a_tied_head_that_the_source_repeats_is_left_out(tmp_path, out):
    model = tiny_llama(tmp_path / "model", dtype="bfloat16", tie_word_embeddings=True, tokenizer=False)
    weights = load(model)
    safetensors.numpy.save_file(
        weights | {"lm_head.weight": weights["model.embed_tokens.weight"]},
        model / "model.safetensors",
        {"format": "pt"},
    )
    plan(model, updates_of(random_adapter(model))).write(out)
    assert load(out).keys() == weights.keys()


def test_rows_at_a_time_give_the_same_file(bf16_model, tmp_path, monkeypatch):
    """Only the order of sums within a product of matrices may differ, which bfloat16 almost never shows."""
    updates = updates_of(random_adapter(bf16_model))
    files = []
    for name, chunk in (("whole", 2**30), ("rows", 24 * 64 * 4)):
        monkeypatch.setattr(merge, "_CHUNK_BYTES", chunk)
        directory = tmp_path / name
        directory.mkdir()
        report = plan(bf16_model, updates).write(directory)
        assert report.columns == 14 * 8
        files.append(load(directory))
    for name, tensor in files[0].items():
        different = (tensor != files[1][name]).mean()
        assert different == 0 if name not in updates else different < 1e-3


def test_a_scale_that_is_not_the_models_is_found(bf16_model, out):
    with pytest.raises(RuntimeError, match=r"_proj.weight: the merged weight is not what the model computes"):
        plan(bf16_model, updates_of(random_adapter(bf16_model), scale=2.0001)).write(out)


def test_an_update_that_vanishes_is_an_error(bf16_model, out):
    tensors = random_adapter(bf16_model)
    tensors[f"{PREFIX}model.layers.1.mlp.up_proj.lora_B.weight"] *= 0
    with pytest.raises(UserError, match=r"1 of 14 adapted weights .* first model.layers.1.mlp.up_proj.weight"):
        plan(bf16_model, updates_of(tensors)).write(out)


def test_a_number_too_large_for_the_dtype_is_an_error(tmp_path, out):
    model = tiny_llama(tmp_path / "model", dtype="bfloat16", tokenizer=False)
    weights = load(model)
    weights["model.norm.weight"][3] = 7e4
    safetensors.numpy.save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UserError, match=r"model.norm.weight has numbers as large as 7.01e\+04, which float16 cannot hold"
    ):
        plan(model, updates_of(random_adapter(model)), dtype=np.dtype(np.float16)).write(out)


def test_what_is_read_back_must_be_what_was_computed(bf16_model, out, monkeypatch):
    original = merge.write_safetensors

    def damaged(file, *arguments):
        original(file, *arguments)
        file.seek(-7, 2)
        file.write(b"\xa5")

    monkeypatch.setattr(merge, "write_safetensors", damaged)
    with pytest.raises(RuntimeError, match="reads back differently from what was written"):
        plan(bf16_model, updates_of(random_adapter(bf16_model))).write(out)


def test_peak_memory_stays_below_a_shard_and_a_float32_tensor(tmp_path):
    """A model of 7 shards whose peak, beyond that of a tiny merge in the same process, is measured."""
    wide = {
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 6,
        "vocab_size": 24_000,
    }
    config = tiny_llama(tmp_path / "sizes", tokenizer=False).joinpath("config.json").read_text()
    large = write_sparse_model(tmp_path / "large", json.loads(config) | wide)
    small = tiny_llama(tmp_path / "small", tokenizer=False)
    shards = [path.stat().st_size for path in large.glob("*.safetensors")]
    largest_tensor = 24_000 * 1024 * 4
    assert len(shards) == 7
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, __file__, *map(str, (small, large, tmp_path))], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout)
    assert grown < max(shards) + largest_tensor < sum(shards)


MEASURE = """
import importlib.util, resource, sys
from pathlib import Path

source, small, large, out = map(Path, sys.argv[1:])
sys.path.insert(0, str(source.parents[2]))
spec = importlib.util.spec_from_file_location("tests_of_merge", source)
tests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tests)

def merge(model):
    directory = out / f"merged_{model.name}"
    directory.mkdir()
    updates = tests.updates_of(tests.random_adapter(model, targets=["q_proj"]))
    tests.plan(model, updates, ["q_proj"]).write(directory)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = merge(small)
print(merge(large) - before)
"""


def write_sparse_model(directory, config):
    """A bfloat16 model of zeros, which take no room on disk, a layer a shard."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    base = open_sizes(config)
    shard_of = {name: f"layer-{name.split('.')[2] if '.layers.' in name else 'none'}.safetensors" for name in base}
    for shard in set(shard_of.values()):
        header, end = {}, 0
        for name in (name for name in base if shard_of[name] == shard):
            size = 2 * int(np.prod(base[name]))
            header[name] = {"dtype": "BF16", "shape": list(base[name]), "data_offsets": [end, end + size]}
            end += size
        with open(directory / shard, "wb") as file:
            file.write(raw_safetensors(header))
            file.truncate(file.tell() + end)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    return directory


def open_sizes(config):
    model = Llama(ModelConfig.from_hf(config), quantization="none", dtype=np.dtype(np.float32))
    return {name: tensor.shape for name, tensor in expected_tensors(model).items()}
