"""What training arguments mean here, and which are refused."""

from pathlib import Path

import pytest

from zagora_jax.config import TrainConfig
from zagora_jax.errors import UserError
from zagora_jax.options import Given, build
from zagora_jax.training_arguments import as_options, merged, own_options


def values(arguments):
    return {name: item.value for name, item in as_options(arguments).given.items()}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"num_train_epochs": 3.0}, {"epochs": 3}),
        ({"max_steps": -1}, {}),
        ({"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}, {"micro_batch_size": 2}),
        ({"bf16": True}, {"compute_dtype": "bfloat16"}),
        ({"fp16": True, "bf16": False}, {"compute_dtype": "float16"}),
        ({"gradient_checkpointing": True}, {"remat": "full"}),
        ({"lr_scheduler_type": "constant_with_warmup"}, {"schedule": "constant"}),
        ({"optim": "paged_adamw_8bit"}, {"optimizer": "adamw_8bit"}),
        ({"optim": "adamw_torch"}, {"optimizer": "adamw"}),
        ({"warmup_ratio": 0.1}, {"warmup_ratio": 0.1}),
        ({"warmup_steps": 0.1}, {"warmup_ratio": 0.1}),
        ({"warmup_steps": 7, "warmup_ratio": 0.1}, {"warmup_steps": 7}),
        ({"eval_strategy": "steps", "eval_steps": 10}, {"eval_every": 10}),
        ({"eval_strategy": "steps", "logging_steps": 5}, {"eval_every": 5, "log_every": 5}),
        ({"eval_strategy": "no", "eval_steps": 10}, {}),
        ({"data_seed": 3, "seed": 3}, {"seed": 3}),
        ({"report_to": ["tensorboard", "wandb"]}, {"track": ["tensorboard", "wandb"]}),
        ({"report_to": "trackio"}, {"track": ["trackio"]}),
        ({"report_to": "none", "save_strategy": "steps", "adam_beta2": 0.999, "tf32": None}, {}),
        ({"output_dir": "o", "max_seq_length": 64}, {"output": "o", "sequence_length": 64}),
        ({"lora": {"rank": 8}, "lora.alpha": 16}, {"lora.rank": 8, "lora.alpha": 16}),
    ],
)
def test_names_of_transformers_and_of_options_are_taken(arguments, expected):
    assert values(arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rte": 1e-4}, "learning_rte: has no counterpart here; did you mean learning_rate?"),
        ({"deepspeed": "zero3.json"}, "deepspeed: has no counterpart here; leave it out: give partition_strategy"),
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha: has no counterpart"),
        ({"adam_beta2": 0.95}, "adam_beta2: expected 0.999, found 0.95"),
        ({"num_train_epochs": 0.5}, "expected a whole number, found 0.5; give max_steps"),
        ({"bf16": True, "fp16": True}, "both true"),
        ({"per_device_train_batch_size": 1, "per_device_eval_batch_size": 8}, "expected that of training, 1, found 8"),
        ({"eval_strategy": "epoch"}, "found 'epoch': give eval_steps"),
        ({"seed": 1, "data_seed": 2}, "expected the seed, 1, found 2"),
        ({"max_length": 64, "max_seq_length": 128}, "sequence_length is given twice: 64 .* and 128"),
        (["a"], "expected transformers.TrainingArguments, a dict or None, found list"),
    ],
)
def test_what_has_no_meaning_here_is_refused_by_name(arguments, message):
    with pytest.raises(UserError, match=message):
        as_options(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bf16": "yes"}, 'training_args: bf16: expected true or false, found "yes"'),
        ({"gradient_checkpointing": "no"}, "training_args: gradient_checkpointing: expected true or false"),
        ({"optim": ["adamw"]}, r"training_args: optim: \['adamw'\] is no value that it can have"),
        ({"eval_steps": [1]}, "training_args: eval_steps: "),
        ({"lora": "all"}, 'training_args: lora: expected a dict of its options, found "all"'),
        ({"learning_rate": "fast"}, 'training_args: learning_rate: expected a number, found "fast"$'),
        ({"model": None}, "training_args: model: expected a text, found null"),
    ],
)
def test_values_of_another_kind_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        build(TrainConfig, {"model": Given("m", "here"), **as_options(arguments).given})


def test_paths_are_texts_where_texts_are_asked_for():
    given = own_options({"model": Path("m"), "data": [Path("a"), "b"], "output": Path("o")}, "T")
    assert [item.value for item in given.values()] == ["m", ["a", "b"], Path("o")]


def test_a_wrong_value_is_named_as_it_was_given():
    given = as_options({"num_train_epochs": 0}).given
    with pytest.raises(UserError, match="training_args: num_train_epochs: epochs: expected at least 1, found 0"):
        build(TrainConfig, {"model": Given("m", "here"), **given})


def test_what_is_given_twice_must_agree():
    first = {"gradient_accumulation_steps": Given(4, "DistributedTrainer")}
    assert merged(first, as_options({"gradient_accumulation_steps": 4}).given).keys() == first.keys()
    with pytest.raises(UserError, match=r"given twice: 4 \(DistributedTrainer\) and 2 \(training_args: gradient"):
        merged(first, as_options({"gradient_accumulation_steps": 2}).given)


def test_unknown_options_are_named_with_the_nearest():
    with pytest.raises(UserError, match=r"T: sequence_lenght: .*did you mean sequence_length"):
        own_options({"sequence_lenght": 3}, "T")
    with pytest.raises(UserError, match=r"T: lora.rnk: .*did you mean lora.rank"):
        own_options({"lora": {"rnk": 3}}, "T")


def test_the_part_that_is_warm_up_is_rounded_up():
    """As transformers' get_warmup_steps does."""
    assert TrainConfig(model="m", data=None, warmup_ratio=0.1).warmup_of(25) == 3
    assert TrainConfig(model="m", data=None, warmup_steps=2).warmup_of(25) == 2
    with pytest.raises(ValueError, match="both say how long"):
        TrainConfig(model="m", data=None, warmup_steps=2, warmup_ratio=0.1)


def test_an_object_means_what_it_says_and_yields_where_only_its_class_speaks():
    pytest.importorskip("torch")
    from transformers import TrainingArguments

    translated = as_options(TrainingArguments(output_dir="out", learning_rate=1e-3, warmup_steps=2))
    given = {name: item.value for name, item in translated.given.items()}
    assert given == {"output": "out", "learning_rate": 1e-3, "warmup_steps": 2}
    usual = {name: item.value for name, item in translated.usual.items()}
    assert usual["epochs"] == 3
    assert usual["seed"] == 42
    assert (usual["schedule"], usual["compute_dtype"], usual["optimizer"]) == ("linear", "float32", "adamw")
    assert "gradient_accumulation_steps" not in usual
    with pytest.raises(UserError, match="neftune_noise_alpha"):
        as_options(TrainingArguments(output_dir="out", neftune_noise_alpha=5.0))
