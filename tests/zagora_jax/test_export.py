"""Exports of a run, against PEFT over the same base model and transformers on what was written."""

import json
import resource
import runpy
import shutil
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors.numpy
from oracles import PROJECTIONS, STORAGE, random_adapter, tiny_llama, transformers_logits, write_adapter

from zagora_jax import exporter
from zagora_jax.checkpoints.run_state import StateWriter
from zagora_jax.checkpoints.source import open_checkpoint
from zagora_jax.commands import ExportConfig
from zagora_jax.config import TrainConfig
from zagora_jax.config_file import save_config
from zagora_jax.errors import UserError
from zagora_jax.exporter import export
from zagora_jax.option_groups import LoraConfig
from zagora_jax.run_directory import RunDirectory
from zagora_jax.train_state import initial_state
from zagora_jax.tuned import open_tuned

ALPHA = 8
TOKENS = np.random.default_rng(1).integers(0, 320, (2, 40))


def make_run(directory, model, *, rslora=False, quantization="nf4", adapter=None, **lora):
    """A run directory as training leaves it, with a random adapter of rank 4."""
    directory.mkdir()
    options = LoraConfig(rank=4, alpha=ALPHA, use_rslora=rslora, **lora)
    rows = directory / "rows.jsonl"
    config = TrainConfig(model=str(model), data=[rows], quantization=quantization, lora=options)
    save_config(config, directory / "config.yaml")
    targets = PROJECTIONS if options.targets == "all-linear" else options.targets
    tensors = random_adapter(model, targets=targets) if adapter is None else adapter
    write_adapter(directory / "adapter", tensors, alpha=ALPHA, use_rslora=rslora, targets=targets)
    fingerprint = open_checkpoint(str(model)).fingerprint()
    write_report(directory, synthetic=False, model_fingerprint=fingerprint, options=config.model_dump(mode="json"))
    return directory


def write_report(run, **entries):
    (run / "report.json").write_text(json.dumps(entries))


def load(directory):
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in safetensors.numpy.load_file(file).items()
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("base") / "model", dtype="bfloat16")


@pytest.fixture
def run(tmp_path, model):
    return make_run(tmp_path / "run", model)


@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        ("float32", {"tie_word_embeddings": True}),
        ("float16", {"attention_bias": True, "mlp_bias": True}),
        ("bfloat16", {"head_dim": 24, "max_shard_size": "100KB"}),
    ],
)
@pytest.mark.parametrize("rslora", [False, True])
def test_logits_of_the_merged_model_are_the_adapters(tmp_path, dtype, config, rslora):
    pytest.importorskip("torch")
    model = tiny_llama(tmp_path / "model", dtype=dtype, **config)
    run = make_run(tmp_path / "run", model, rslora=rslora)
    export(ExportConfig(run=run, to=tmp_path / "out"))
    # The same with the sums kept in float32, and with PEFT's own sums rounded by torch.
    export(ExportConfig(run=run, to=tmp_path / "wide", dtype="float32"))
    peft_merge(model, run / "adapter", tmp_path / "peft", dtype)
    adapters = transformers_logits(model, TOKENS, adapter=run / "adapter")
    wide, merged, rounded = (transformers_logits(tmp_path / name, TOKENS) for name in ("wide", "out", "peft"))
    scale = np.abs(adapters).max()
    assert np.abs(adapters - transformers_logits(model, TOKENS)).max() > 0.1 * scale  # it does something
    # float32 through two layers, as issue 2 bounds the model itself.
    assert np.abs(wide - adapters).max() <= 2e-4 * scale
    # Rounding to 16 bits moves the logits by as much as it does when PEFT's merge is rounded, and to the same place:
    # the float32 sums of the two differ in their last bit, which only turns what lies midway between two neighbours.
    assert np.abs(merged - adapters).max() <= 1.1 * np.abs(rounded - adapters).max() + 2e-4 * scale
    assert np.abs(merged - rounded).max() <= 0.1 * np.abs(rounded - adapters).max() + 2e-4 * scale


def peft_merge(model, adapter, directory, dtype):
    """PEFT's merge in float32, rounded to `dtype` by torch."""
    import torch
    from oracles import load_peft

    load_peft(model, adapter).merge_and_unload().to(getattr(torch, dtype)).save_pretrained(directory)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_over_the_dequantized_base_are_those_that_training_saw(tmp_path, dtype):
    pytest.importorskip("bitsandbytes")
    # Square matrices have one shape, which is compiled once.
    model = tiny_llama(tmp_path / "model", dtype=dtype, intermediate_size=64, num_key_value_heads=4)
    run = make_run(tmp_path / "run", model, targets=["q_proj", "down_proj"])
    result = export(ExportConfig(run=run, to=tmp_path / "out", base="dequantized", dtype="float32"))
    quantized = transformers_logits(model, TOKENS, adapter=run / "adapter", quantization="nf4")
    original = transformers_logits(model, TOKENS, adapter=run / "adapter")
    merged = transformers_logits(tmp_path / "out", TOKENS)
    scale = np.abs(quantized).max()
    assert np.abs(merged - quantized).max() <= 2e-4 * scale
    assert np.abs(original - quantized).max() > 0.05 * scale  # so it is the other base
    assert result.merge is not None
    assert (result.merge.adapted, result.merge.changed) == (4, 4)


def test_the_adapter_alone_loads_in_peft(tmp_path, run, model):
    peft = pytest.importorskip("peft")
    result = export(ExportConfig(run=run, to=tmp_path / "out", format="adapter"))
    assert result.files == (
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    )
    before, after = load(run / "adapter"), load(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(after[name].tobytes() == tensor.tobytes() for name, tensor in before.items())
    assert "28 tensors for 14 adapted weights" in result.checks[0]
    # The base model is found by the path in adapter_config.json.
    import torch

    network = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        logits = network.eval()(input_ids=torch.from_numpy(TOKENS)).logits.numpy()
    # The same program on the same numbers, but for the kind of attention.
    expected = transformers_logits(model, TOKENS, adapter=run / "adapter")
    assert np.abs(logits - expected).max() <= 2e-4 * np.abs(expected).max()


def test_the_merged_model_is_accompanied_as_its_source(tmp_path, run, model):
    (model / "generation_config.json").write_text('{"eos_token_id": 258, "temperature": 0.7}')
    result = export(ExportConfig(run=run, to=tmp_path / "out"))
    copied = sorted(path.name for path in model.iterdir() if path.suffix != ".safetensors")
    assert sorted(result.files) == sorted([*copied, "README.md", "model.safetensors"])
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= set(copied)
    for name in copied:
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes(), name
    card = (tmp_path / "out" / "README.md").read_text()
    assert "rank 4, scale 2" in card
    assert "the original weights" in card
    assert str(model.parent) not in card  # no path of this machine
    assert all(check in card for check in result.checks)


def test_the_dtype_is_written_down(tmp_path, run, model):
    export(ExportConfig(run=run, to=tmp_path / "out", dtype="float16"))
    config, source = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "out", model))
    assert source["dtype"] == "bfloat16"
    assert config == source | {"dtype": "float16"}
    assert {tensor.dtype for tensor in load(tmp_path / "out").values()} == {np.dtype(np.float16)}
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template


def test_a_tied_model_stays_tied(tmp_path):
    model = tiny_llama(tmp_path / "model", tie_word_embeddings=True)
    run = make_run(tmp_path / "run", model, targets=["q_proj"])
    result = export(ExportConfig(run=run, to=tmp_path / "out"))
    assert "lm_head.weight" not in load(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True
    assert result.merge is not None
    assert (result.merge.adapted, result.merge.changed) == (2, 2)


def test_an_adapter_is_read_in_its_own_dtype(tmp_path, model):
    """The same values as float32, float16 and bfloat16: values that all three hold exactly give the same merge."""
    tensors = random_adapter(model).items()
    exact = {name: tensor.astype(np.float16).astype(ml_dtypes.bfloat16) for name, tensor in tensors}
    merged = {}
    for dtype, storage in STORAGE.items():
        run = make_run(tmp_path / dtype, model, adapter={name: t.astype(storage) for name, t in exact.items()})
        export(ExportConfig(run=run, to=tmp_path / f"{dtype}-out"))
        merged[dtype] = load(tmp_path / f"{dtype}-out")
    for name, tensor in merged["float32"].items():
        assert merged["float16"][name].tobytes() == tensor.tobytes(), name
        assert merged["bfloat16"][name].tobytes() == tensor.tobytes(), name


def test_the_command(tmp_path, run, monkeypatch, capsys):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    arguments = ["export", str(run), "--to", "out"]
    assert command(arguments, monkeypatch) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "14 of 14 adapted weights differ from the base model's" in printed
    assert "all 21 tensors, read back from the files, equal what was computed" in printed
    assert "112 columns of the merged weights equal what the model's layers compute" in printed
    assert "merged: out" in printed
    assert command(arguments, monkeypatch) == 2
    assert "Give --overwrite" in capsys.readouterr().err
    assert command([*arguments, "--overwrite", "--format", "adapter"], monkeypatch) == 0
    assert not (tmp_path / "elsewhere" / "out" / "config.json").exists()
    assert (tmp_path / "elsewhere" / "out" / "adapter_config.json").exists()


def command(arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("zagora_jax.export", run_name="__main__")
    return exit_.value.code


def test_nothing_is_left_of_an_export_that_fails(tmp_path, run, monkeypatch):
    monkeypatch.setattr(exporter.Merge, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        export(ExportConfig(run=run, to=tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


class TestRefusals:
    """Each is found before anything is written."""

    def refuse(self, tmp_path, message, **options):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(UserError, match=message):
            export(ExportConfig(**{"run": tmp_path / "run", "to": tmp_path / "out"} | options))
        assert sorted(tmp_path.rglob("*")) == before

    def test_no_run(self, tmp_path):
        self.refuse(tmp_path, "not a run directory")

    def test_synthetic_weights(self, tmp_path, run):
        write_report(run, synthetic=True)
        self.refuse(tmp_path, "random weights: there is nothing to export")

    def test_no_adapter_yet(self, tmp_path, run):
        shutil.rmtree(run / "adapter")
        self.refuse(tmp_path, "no adapter is saved yet")

    def test_another_base_model(self, tmp_path):
        model = tiny_llama(tmp_path / "model")
        make_run(tmp_path / "run", model)
        tiny_llama(model, seed=1)
        self.refuse(tmp_path, "is not the model that .*run was trained on any more")

    def test_no_fingerprint(self, tmp_path, run):
        write_report(run, synthetic=False)
        self.refuse(tmp_path, r"report\.json: no model_fingerprint")

    def test_a_base_that_was_not_quantized(self, tmp_path, model):
        make_run(tmp_path / "run", model, quantization="none")
        self.refuse(tmp_path, "trained with quantization none; leave --base out", base="dequantized")

    @pytest.mark.parametrize("format_", ["merged", "adapter"])
    def test_an_untrained_adapter(self, tmp_path, model, format_):
        tensors = random_adapter(model)
        make_run(tmp_path / "run", model, adapter={n: t * (0 if ".lora_B." in n else 1) for n, t in tensors.items()})
        self.refuse(tmp_path, "every lora_B is zero", format=format_)

    def test_a_diverged_adapter(self, tmp_path, model):
        tensors = random_adapter(model)
        next(iter(tensors.values()))[1, 2] = np.nan
        make_run(tmp_path / "run", model, adapter=tensors)
        self.refuse(tmp_path, r"lora_A\.weight holds numbers that are not finite")

    def test_an_adapter_of_other_modules(self, tmp_path, model):
        make_run(tmp_path / "run", model, adapter=random_adapter(model, targets=["q_proj"]))
        self.refuse(tmp_path, r"lacks base_model\.model\.model\.layers\.0\.mlp\.down_proj\.lora_A\.weight")

    def test_an_adapter_of_other_shapes(self, tmp_path, model):
        make_run(tmp_path / "run", model, adapter=random_adapter(model, rank=3))
        self.refuse(tmp_path, r"has shape \(3, 192\), the model needs \(4, 192\)")

    @pytest.mark.parametrize("format_", ["merged", "adapter"])
    def test_too_little_room(self, tmp_path, run, monkeypatch, format_):
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
        self.refuse(tmp_path, r"needs 0\.\d\d GiB, but .* has 0\.00 GiB free", format=format_)

    @pytest.mark.parametrize("name", ["run/adapter", "model"])
    def test_what_the_export_reads(self, tmp_path, name):
        make_run(tmp_path / "run", tiny_llama(tmp_path / "model"))
        self.refuse(tmp_path, "would replace .*, which the export reads", to=tmp_path / name, overwrite=True)

    @pytest.mark.parametrize("name", ["run/adapter/merged", "run/checkpoints/7"])
    def test_a_place_inside_what_the_run_keeps(self, tmp_path, name):
        make_run(tmp_path / "run", tiny_llama(tmp_path / "model"))
        self.refuse(tmp_path, "lies in .*, which belongs to the run", to=tmp_path / name)

    @pytest.mark.parametrize("change", [{"alpha": 64}, {"use_rslora": True}])
    def test_another_scale_than_the_adapter_was_trained_with(self, tmp_path, run, change):
        config = RunDirectory(run).read_config()
        lora = config.lora.model_copy(update=change)
        RunDirectory(run).write_config(config.model_copy(update={"lora": lora}))
        self.refuse(tmp_path, "config.yaml: lora is .*, but the adapter was trained with .* Set it back")

    def test_a_link_to_what_the_export_reads(self, tmp_path):
        make_run(tmp_path / "run", tiny_llama(tmp_path / "model"))
        (tmp_path / "link").symlink_to(tmp_path / "model")
        self.refuse(tmp_path, "would replace .*, which the export reads", to=tmp_path / "link", overwrite=True)


def test_a_checkpoint_is_exported_in_place_of_the_newest_adapter(tmp_path, run):
    tuned = open_tuned(run)
    doubled = jax.tree.map(lambda leaf: leaf * 2, tuned.adapters)
    state = initial_state(doubled, optax.identity(), "float32")._replace(step=jnp.int32(7))
    progress = {"options": tuned.config.model_dump(mode="json")}
    StateWriter(run / "checkpoints", keep=1, after_step=7).save(state, progress)
    export(ExportConfig(run=run, to=tmp_path / "newest", format="adapter"))
    export(ExportConfig(run=run, to=tmp_path / "seven", format="adapter", checkpoint=7))
    newest, seven = load(tmp_path / "newest"), load(tmp_path / "seven")
    assert newest.keys() == seven.keys()
    assert all(np.array_equal(seven[name], 2 * newest[name]) for name in newest)
    with pytest.raises(UserError, match="no checkpoint of step 3; the steps saved are 7"):
        export(ExportConfig(run=run, to=tmp_path / "three", checkpoint=3))


@pytest.mark.parametrize("format_", ["merged", "adapter"])
def test_a_disk_that_fills_up_leaves_nothing(tmp_path, run, format_):
    """The limit is on the size of a file; the error comes from the system as that of a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (35_000, limits[1]))
    try:
        with pytest.raises(UserError, match="File too large"):
            export(ExportConfig(run=run, to=tmp_path / "to", format=format_))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    export(ExportConfig(run=run, to=tmp_path / "to", format=format_))


def test_an_export_of_weights_that_were_quantised_already_adds_to_their_dequantised_values(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    source = tiny_llama(tmp_path / "source", intermediate_size=64, num_key_value_heads=4)
    network = AutoModelForCausalLM.from_pretrained(
        source,
        dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        device_map={"": "cpu"},
    )
    model = tmp_path / "model"
    network.save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, model)
    adapter = random_adapter(source, targets=["q_proj", "down_proj"])
    run = make_run(tmp_path / "run", model, targets=["q_proj", "down_proj"], adapter=adapter)
    for base in ("original", "dequantized"):  # the same here
        export(ExportConfig(run=run, to=tmp_path / base, base=base))
        assert "quantization_config" not in json.loads((tmp_path / base / "config.json").read_text())
        assert "nf4-single weights, dequantized" in (tmp_path / base / "README.md").read_text()
    theirs = transformers_logits(model, TOKENS, adapter=run / "adapter")
    merged = transformers_logits(tmp_path / "original", TOKENS)
    assert np.abs(merged - theirs).max() <= 2e-4 * np.abs(theirs).max()
    assert load(tmp_path / "original").keys() == load(source).keys()


def test_the_ends_that_training_taught_are_written_down(tmp_path):
    """The chat template ends turns with another token than the tokenizer's EOS, and the configuration knows neither."""
    model = tiny_llama(tmp_path / "model", eos_token_id=[5, 6])
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"eos_token": "<|endoftext|>"}))
    (model / "generation_config.json").write_text('{"eos_token_id": 256}')
    export(ExportConfig(run=make_run(tmp_path / "run", model, targets=["q_proj"]), to=tmp_path / "out"))
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == [256, 258]
