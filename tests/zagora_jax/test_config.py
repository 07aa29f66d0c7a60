"""The options themselves: defaults, what goes together, and the page made from them."""

import runpy
from pathlib import Path

import pytest
from pydantic import ValidationError

from zagora_jax.commands import COMMANDS, CheckConfig, ExportConfig, GenerateConfig, PreviewConfig
from zagora_jax.config import TrainConfig
from zagora_jax.option_groups import LoraConfig
from zagora_jax.options import options_of

DOCS = Path(__file__).resolve().parents[2] / "docs"


def train_config(**options) -> TrainConfig:
    return TrainConfig.model_validate({"model": "org/base", "data": ["rows.jsonl"], **options})


@pytest.mark.parametrize(
    ("model", "output"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct"),
        ("/weights/llama/", "llama"),
        ("weights/llama-3.2-1b.Q4_0.gguf", "llama-3.2-1b.Q4_0"),
        ("synthetic:llama-3-8b?layers=4", "synthetic-llama-3-8b-layers-4"),
        ("..", "run"),
    ],
)
def test_the_run_directory_is_named_after_the_model(model, output):
    assert train_config(model=model).output == Path("runs") / output


@pytest.mark.parametrize(
    ("option", "caches", "folder"),
    [
        ("auto", "/caches", "/caches/zagora-jax/quantized"),
        ("auto", "relative", "~/.cache/zagora-jax/quantized"),  # which the specification says to ignore
        ("auto", "", "~/.cache/zagora-jax/quantized"),
        ("off", "/caches", None),
        ("~/models", "/caches", "~/models"),
    ],
)
def test_quantised_models_are_kept_where_the_option_says(monkeypatch, option, caches, folder):
    monkeypatch.setenv("XDG_CACHE_HOME", caches)
    assert train_config(quantized_cache=option).quantized_folder == (folder and Path(folder).expanduser())


def test_options_of_listed_values_and_others_show_both():
    options = options_of(TrainConfig)
    forms = {name: options[name].values for name in ("quantized_cache", "offload.weights", "stage_layers", "remat")}
    assert forms == {
        "quantized_cache": "auto|off|PATH",
        "offload.weights": "none|all|auto|N",
        "stage_layers": "auto|N[,N]",
        "remat": "auto|full|attention|mlp|none|nested|stage",
    }


def test_home_and_single_paths():
    config = train_config(data="~/rows.jsonl", eval_data=Path("held_out.jsonl"))
    assert config.data == [str(Path.home() / "rows.jsonl")]
    assert config.eval_data == ["held_out.jsonl"]


@pytest.mark.parametrize(
    "options",
    [
        {"eval_every": 5},
        {"max_steps": 10, "warmup_steps": 10},
        {"max_steps": 0},
        {"epochs": 0},
        {"gradient_accumulation_steps": 0},
        {"micro_batch_size": 0},
        {"sequence_length": 1},
        {"learning_rate": float("nan")},
        {"learning_rate": 0.0},
        {"seed": 2**32},
        {"packing": 1},
        {"epochs": 1.0},
        {"epochs": True},
        {"data": []},
        {"data": [" "]},
        {"model": ""},
        {"lora": {"rank": 0}},
        {"lora": {"dropout": 1.0}},
        {"lora": {"dropout": -0.1}},
        {"lora": {"targets": []}},
        {"lora": {"targets": ["q_proj", " "]}},
        {"lora": {"targets": ".*(q_proj"}},
        {"lora": {"rnk": 8}},
        {"colour": "always"},
    ],
)
def test_wrong_options_are_refused(options):
    with pytest.raises(ValidationError):
        train_config(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remat": "offload"}, "expected full with --offload.activations true"),
        ({"remat": "nested", "offload": {"activations": True}}, "does not go with remat nested, .* give another remat"),
    ],
)
def test_layer_inputs_are_offloaded_with_what_keeps_them(options, message):
    with pytest.raises(ValidationError, match=message):
        train_config(**options)
    assert train_config(remat="attention", offload={"activations": True}).offload.activations


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "layerwise", "stage_layers": []}, "at least 1 item"),
        ({"stage_layers": [1, 1]}, "stage_layers is for strategy layerwise"),
        ({"stage_form": "programs", "strategy": "fsdp"}, "stage_form is for strategy layerwise"),
        ({"balance": {"patience": 5}}, "balance is for strategy layerwise: leave it out"),
        ({"strategy": "layerwise", "remat": "nested"}, "remat nested does not go with strategy layerwise"),
        ({"remat": "stage"}, "remat stage is for strategy layerwise"),
    ],
)
def test_what_is_for_stages_goes_with_stages(options, message):
    with pytest.raises(ValidationError, match=message):
        train_config(**options)


@pytest.mark.parametrize(
    ("sites", "others", "message"),
    [
        ({"folder": "shared"}, {}, "give sites.name too"),
        ({"name": "home"}, {}, "give sites.folder too"),
        ({"folder": "shared", "name": "../home"}, {}, "expected letters, digits, - and _"),
        ({"share": "5/4"}, {}, "expected PART/PARTS, such as 2/4"),
        ({"share": "0/4"}, {}, "expected PART/PARTS, such as 2/4"),
        ({"share": "1/2"}, {"retrieval": {"pooling": "last"}}, "give each site a file of its own"),
        ({"folder": "shared", "name": "home"}, {"lora": {"initialization": "pissa"}}, "lora.initialization pissa"),
    ],
)
def test_what_sites_cannot_do_is_refused(sites, others, message):
    with pytest.raises(ValidationError, match=message):
        train_config(sites=sites, **others)
    right = train_config(sites={"folder": "s3://bucket/run", "name": "home-1", "share": "2/4"})
    assert right.sites.part == (1, 4)
    assert train_config().sites.part == (0, 1)
    assert right.with_absolute_paths().sites.folder == "s3://bucket/run"
    local = train_config(sites={"folder": "shared", "name": "home"})
    assert local.with_absolute_paths().sites.folder == str(Path("shared").absolute())


def test_right_neighbours_of_the_wrong_options():
    config = train_config(
        eval_every=5, eval_data="e.jsonl", max_steps=10, warmup_steps=9, sequence_length=2, seed=2**32 - 1
    )
    assert (config.eval_every, config.warmup_steps, config.seed) == (5, 9, 2**32 - 1)
    assert LoraConfig(rank=1, dropout=0.99, targets=".*(q_proj)").rank == 1


def test_a_configuration_never_changes():
    with pytest.raises(ValidationError, match="frozen"):
        train_config().epochs = 2  # type: ignore[misc]


def test_check_and_preview_take_what_train_takes():
    assert set(options_of(PreviewConfig)) == set(options_of(TrainConfig)) | {"rows", "colour", "json"}
    assert set(options_of(CheckConfig)) == set(options_of(TrainConfig)) | {"rows", "json"}


def test_merge_options_belong_to_merged_exports():
    paths = {"run": Path("runs/x"), "to": Path("out")}
    assert ExportConfig(**paths, base="dequantized", dtype="float32").format == "merged"
    for wrong in ({"base": "dequantized"}, {"dtype": "float32"}):
        with pytest.raises(ValidationError, match="leave them out"):
            ExportConfig(**paths, format="adapter", **wrong)


def test_generation_takes_one_source_of_prompts():
    assert GenerateConfig(model="runs/x", prompt="Hello").temperature == 0
    for wrong in ({}, {"prompt": "a", "prompts": Path("b")}):
        with pytest.raises(ValidationError, match="either prompt or prompts"):
            GenerateConfig(model="runs/x", **wrong)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_what_it_means(command):
    for option in options_of(command).values():
        assert option.field.description, option.name
        assert option.values, option.name
    assert set(command.headings) <= set(options_of(command))


def test_the_options_page_is_current():
    generator = runpy.run_path(str(DOCS / "generate_options.py"))
    page = (DOCS / "options.md").read_text("utf-8")
    assert page == generator["options_page"](), "run `python docs/generate_options.py`"
    for option in options_of(TrainConfig):
        assert f"| `{option}` |" in page
