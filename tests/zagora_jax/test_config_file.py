"""YAML in and out: what is read, what is refused and where, and that files read back equal."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zagora_jax.config import TrainConfig
from zagora_jax.config_file import load_config, save_config
from zagora_jax.errors import UserError
from zagora_jax.option_groups import LoraConfig

MINIMUM = "model: base\ndata: rows.jsonl\n"


def load(tmp_path: Path, text: str) -> TrainConfig:
    path = tmp_path / "config.yaml"
    path.write_text(text, "utf-8")
    return load_config(TrainConfig, path)


def test_a_file_of_all_kinds(tmp_path):
    config = load(
        tmp_path,
        """\
model: 2024            # a name, though YAML alone reads a number
data: [1e5, b.jsonl]
eval_data: &held_out held.jsonl
output: no
lora:
  rank: 8
  targets: '.*\\.(q|v)_proj'
quantization: none
learning_rate: 1e-4
packing: True
max_steps: null
resume: "true"
""",
    )
    assert config.model == "2024"
    assert config.data == ["1e5", "b.jsonl"]
    assert config.eval_data == ["held.jsonl"]
    assert config.output == Path("no")
    assert config.lora == LoraConfig(rank=8, targets=r".*\.(q|v)_proj")
    assert (config.quantization, config.learning_rate, config.packing) == ("none", 1e-4, True)
    assert config.max_steps is None
    assert config.resume == Path("true")  # quoted, so a text: a path


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.0e-4", ".1e-3", "0.0001", "+1e-4"])
def test_numbers_with_exponents(tmp_path, text):
    assert load(tmp_path, f"{MINIMUM}learning_rate: {text}\n").learning_rate == 1e-4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rte: 1", r"config\.yaml:3: unknown option learning_rte; the nearest is learning_rate$"),
        ("learning-rate: 1", r"config\.yaml:3: unknown option learning-rate; the nearest is learning_rate$"),
        ("lr: 1", r"config\.yaml:3: unknown option lr; the nearest is learning_rate$"),
        ("rank: 1", r"config\.yaml:3: unknown option rank; the nearest is rank, within lora:$"),
        ("lora.rank: 1", r"config\.yaml:3: unknown option lora\.rank; the nearest is rank, within lora:$"),
        ("lora:\n  rnk: 1", r"config\.yaml:4: unknown option lora\.rnk; the nearest is rank, within lora:$"),
        ("zzz: 1", r"config\.yaml:3: unknown option zzz; the options here are model, quantization, "),
        ("? [a, b]\n: 1", r"config\.yaml:3: unknown option "),
        ("<<: {epochs: 2}", r"config\.yaml:3: unknown option <<"),
        ("epochs: 1\nseed: 2\nepochs: 1", r"config\.yaml:5: epochs is given twice, first on line 3$"),
        ("lora: {rank: 1, rank: 1}", r"config\.yaml:3: lora\.rank is given twice, first on line 3$"),
        ("epochs: two", r'^\S+config\.yaml:3: epochs: expected a whole number, found "two"$'),
        ("epochs: 010", r'config\.yaml:3: epochs: expected a whole number, found "010"$'),
        ("epochs: 1.5", r"config\.yaml:3: epochs: expected a whole number, found 1\.5$"),
        ("epochs:", r"config\.yaml:3: epochs: expected a whole number, found null$"),
        ("epochs: [1]", r"config\.yaml:3: epochs: expected a whole number, found \[1\]$"),
        ("epochs: 0", r"config\.yaml:3: epochs: expected at least 1, found 0$"),
        ("packing: yes", r'config\.yaml:3: packing: expected true or false, found "yes"$'),
        ("learning_rate: fast", r'config\.yaml:3: learning_rate: expected a number, found "fast"$'),
        ("learning_rate: .nan", r"config\.yaml:3: learning_rate: expected a finite number, found NaN$"),
        ("learning_rate: 1e999", r"config\.yaml:3: learning_rate: expected a finite number, found Infinity$"),
        ("quantization: fp4", r"config\.yaml:3: quantization: expected 'nf4', 'hqq', 'int8' or 'none', found \"fp4\"$"),
        ("resume: [a]", r"config\.yaml:3: resume: expected true or false or a path, found \[\"a\"\]$"),
        (
            "eval_data: [a, {b: 1}]",
            r"config\.yaml:3: eval_data: expected a path or the name of a data set, found \{\"b\": 1\}$",
        ),
        ("eval_data: []", r"config\.yaml:3: eval_data: expected a list that is not empty, found \[\]$"),
        ("lora: 8", r"config\.yaml:3: lora: expected a mapping of options \(rank, alpha, .*\), found 8$"),
        ("lora:", r"config\.yaml:3: lora: expected a mapping of options \(rank, alpha, .*\), found null$"),
        (
            "lora:\n  targets: '(q'",
            r"config\.yaml:4: lora\.targets: expected a regular expression \(.*\), found \"\(q\"$",
        ),
        ("lora:\n\trank: 8", r"config\.yaml:4: not valid YAML: .*indent with spaces, not with tabs$"),
        ("epochs: [1", r"config\.yaml:\d: not valid YAML: "),
        ("seed: 1\n---\nseed: 2", r"config\.yaml:4: not valid YAML: .*another document"),
        ("model: !!python/name:os.system x", r"config\.yaml:3: "),
        ("eval_data: !!python/name:os.system x", r"config\.yaml:3: not valid YAML: could not determine a constructor"),
        (
            "eval_data: &a [*a]",
            r"config\.yaml:3: not valid YAML: aliases \(\*name\) are not read; write the value out$",
        ),
        (f"eval_data: {'[' * 5000}", r"config\.yaml:3: not valid YAML: the values are nested too deeply$"),
        ("seed: !!int two", r"config\.yaml:3: not valid YAML: expected int"),
        ("packing: !!bool maybe", r"config\.yaml:3: not valid YAML: expected bool"),
        ("output: !!timestamp today", r"config\.yaml:3: not valid YAML: expected timestamp"),
        (f"seed: {'9' * 5000}", r"config\.yaml:3: not valid YAML: expected int"),
        ("eval_every: 5", r"^eval_every is 5 but there is no eval_data"),
        ("seed: \0", r"config\.yaml: not valid YAML: unacceptable character"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        load(tmp_path, f"{MINIMUM}{text}\n")


def test_all_wrong_values_are_told_at_once(tmp_path):
    with pytest.raises(UserError) as refused:
        load(tmp_path, "epochs: 0\nseed: -1\n")
    lines = str(refused.value).splitlines()
    assert [line.split(": ", 1)[0].rpartition("/")[2] for line in lines] == [
        "model is required",
        "config.yaml:1",
        "config.yaml:2",
    ]


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_an_empty_file(tmp_path, text):
    with pytest.raises(UserError, match=r"config\.yaml"):
        load(tmp_path, text)


@pytest.mark.parametrize("text", ["- model: base\n", "just words\n"])
def test_a_file_that_is_no_mapping(tmp_path, text):
    with pytest.raises(UserError, match=r"config\.yaml:1: expected a mapping of options \(model, "):
        load(tmp_path, text)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"absent\.yaml: .*No such file"):
        load_config(TrainConfig, tmp_path / "absent.yaml")
    with pytest.raises(UserError, match=r"can't be read: Is a directory"):
        load_config(TrainConfig, tmp_path)
    (tmp_path / "latin.yaml").write_bytes("model: é\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.yaml: expected YAML in UTF-8"):
        load_config(TrainConfig, tmp_path / "latin.yaml")


# What YAML could take for something other than the text that it is.
TRICKY = st.sampled_from(
    ["no", "null", "~x", "1e-4", "010", "a: b", "#x", "[a]", "true", "1:30", "é ", "- x", "<<", "="]
)
TEXT = TRICKY | st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=8)
SOURCES = TEXT.filter(lambda text: not text.startswith("~"))
PATHS = SOURCES.map(Path)


@settings(max_examples=60, deadline=None)
@given(
    model=TEXT,
    data=st.lists(SOURCES, min_size=1, max_size=3),
    eval_data=st.none() | st.lists(SOURCES, min_size=1, max_size=2),
    output=PATHS,
    resume=st.booleans() | PATHS,
    learning_rate=st.floats(1e-30, 1e30),
    max_steps=st.none() | st.integers(1, 10**9),
    targets=st.lists(TEXT.filter(str.strip), min_size=1, max_size=3) | st.just(r".*\.(q|v)_proj"),
    dropout=st.floats(0, 1, exclude_max=True),
)
def test_a_saved_configuration_reads_back_equal(tmp_path_factory, targets, dropout, **options):
    config = TrainConfig(lora=LoraConfig(targets=targets, dropout=dropout), **options)
    path = tmp_path_factory.mktemp("run") / "config.yaml"
    save_config(config, path)
    assert load_config(TrainConfig, path) == config
    assert set(path.parent.iterdir()) == {path}  # no temporary file is left


def test_a_saved_configuration_holds_the_defaults_too(tmp_path):
    save_config(TrainConfig(model="base", data=[Path("a")]), tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert all(f"{name}:" in text for name in TrainConfig.model_fields)
    assert "  use_rslora: false\n" in text
