"""The trainers for programs: the very same training as the command's, with rows from memory."""

import json
import subprocess
import sys

import numpy as np
import pytest
from oracles import tiny_llama
from runs import compiled_once, numbers, recorder, write_rows
from safetensors.numpy import load_file

import zagora_jax
from zagora_jax import trainers
from zagora_jax.callbacks import Callback
from zagora_jax.checkpoints import load_tokenizer, open_checkpoint
from zagora_jax.config import TrainConfig
from zagora_jax.data.files import read_rows
from zagora_jax.errors import UserError
from zagora_jax.trainer import train

OPTIONS = {"max_steps": 2, "seed": 1, "sequence_length": 64, "learning_rate": 1e-2, "remat": "full"}
LORA = {"rank": 4, "alpha": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainers")
    tiny_llama(folder / "model")
    write_rows(folder / "rows.jsonl", 8)
    with compiled_once(folder / "programs"):
        yield folder


@pytest.fixture(scope="module")
def rows(folder):
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(folder, rows):
    """A training by the face, with arguments in all three places."""
    trainer = zagora_jax.DistributedTrainer(
        folder / "model",
        gpu_ids=[0],
        partition_strategy="fsdp",
        gradient_accumulation_steps=2,
        lora=LORA,
        quantized_cache="off",
        output=str(folder / "face"),
        reporter=recorder()[0],
    )
    arguments = {"per_device_train_batch_size": 2, "bf16": False, "gradient_accumulation_steps": 2}
    tokenizer = load_tokenizer(open_checkpoint(str(folder / "model")))
    result = trainer.train(rows, tokenizer, arguments, eval_dataset=rows[:2], **OPTIONS)
    return trainer, result


def test_the_face_trains_as_the_command_does(folder, trained):
    trainer, result = trained
    config = TrainConfig(
        model=str(folder / "model"),
        data=[str(folder / "rows.jsonl")],
        eval_data=[str(folder / "rows.jsonl")],
        output=folder / "command",
        micro_batch_size=2,
        gradient_accumulation_steps=2,
        compute_dtype="float32",
        strategy="fsdp",
        quantized_cache="off",
        **OPTIONS | {"lora": LORA},
    )
    train(config, recorder()[0])
    assert numbers(folder / "face") == numbers(folder / "command")
    mine, theirs = (load_file(folder / run / "adapter/adapter_model.safetensors") for run in ("face", "command"))
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine.keys() | theirs.keys())
    assert [line["step"] for line in trainer.history] == [1, 2]
    assert result.steps == 2


def test_evaluate_generate_and_export(folder, trained, rows):
    trainer, result = trained
    assert trainer.evaluate()["eval_loss"] == pytest.approx(result.loss_after, rel=1e-6)
    assert trainer.evaluate(rows[:2]) == trainer.evaluate()
    one, several = trainer.generate("What is 3?", max_new_tokens=2), trainer.generate(["a", "b"], max_new_tokens=2)
    assert isinstance(one, str)
    assert len(several) == 2
    adapter = trainer.save_adapter(folder / "adapter")
    assert (adapter / "adapter_config.json").is_file()
    assert (trainer.export_merged(folder / "merged") / "model.safetensors").is_file()
    with pytest.raises(UserError, match="is a file; give a directory"):
        trainer.save_adapter(folder / "rows.jsonl")


def test_a_run_is_taken_up_from_its_directory(folder, trained):
    trainer, result = trained
    again = zagora_jax.DistributedTrainer.from_run(folder / "face", reporter=recorder()[0])
    assert again.history == trainer.history
    assert again.config == trainer.config.model_copy(update={"output": folder / "face"}).with_absolute_paths()
    assert again.train(resume=True) == result  # finished already
    with pytest.raises(UserError, match="not a run directory"):
        zagora_jax.DistributedTrainer.from_run(folder / "model")


def test_another_training_into_the_same_run_is_refused_before_it_writes(folder, trained):
    trainer, _ = trained
    before = sorted((folder / "face/data").iterdir())
    with pytest.raises(UserError, match="holds a run already"):
        trainer.train([{"text": "other"}], max_steps=1)
    assert sorted((folder / "face/data").iterdir()) == before


def test_a_domain_is_packed_and_split(folder, tmp_path, monkeypatch):
    texts = [{"text": f"The fact number {number}. " * 12} for number in range(4)]
    given = {
        "base_model": str(folder / "model"),
        "domain_data": texts,
        "epochs": 3,
        "batch_size_per_gpu": 2,
        "gradient_checkpointing": True,
        "optimizer": "adamw_8bit",
        "max_length": 64,
        "output_dir": str(tmp_path / "run"),
        "learning_rate": 1e-4,
    }
    trained = []
    monkeypatch.setattr(trainers, "train", lambda config, *_: trained.append(config))
    zagora_jax.DomainAdaptationTrainer(given, gpu_count=1, reporter=recorder()[0]).adapt()
    (config,) = trained
    assert [row.value for row in read_rows(config.data[0])] == texts
    assert (config.packing, config.long_rows, config.sequence_length) == (True, "split", 64)
    assert (config.optimizer, config.remat, config.micro_batch_size) == ("adamw_8bit", "full", 2)
    assert (config.epochs, config.learning_rate, config.devices) == (3, 1e-4, [0])


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"base_model": "m"}, {}, "config: domain_data is required; found base_model"),
        ({"base_model": "m", "domain_data": ["a"], "batch": 1}, {}, "config: batch: has no counterpart"),
        ({"base_model": "m", "domain_data": ["a"]}, {"gpu_count": 0}, "gpu_count: expected 1 or more, found 0"),
        ({"base_model": "m", "domain_data": ["a"]}, {"communication_backend": "gloo"}, "expected auto or nccl"),
        ({"base_model": "m", "domain_data": ["a"]}, {"communication_backend": "nccl"}, "for NVIDIA GPUs, found cpu"),
    ],
)
def test_a_wrong_domain_configuration_is_refused(config, options, message):
    with pytest.raises(UserError, match=message):
        zagora_jax.DomainAdaptationTrainer(config, **options)


def test_wrong_arguments_are_refused_before_anything_is_written(folder, tmp_path, rows):
    def trainer(**options):
        return zagora_jax.DistributedTrainer(folder / "model", output=str(tmp_path / "run"), **options)

    with pytest.raises(UserError, match=r"given twice: 4 .DistributedTrainer: gradient.* and 8 .train: gradient"):
        trainer(gradient_accumulation_steps=4).train(rows, gradient_accumulation_steps=8)
    with pytest.raises(UserError, match="DistributedTrainer: partition_strategy: strategy: expected 'auto'"):
        trainer(partition_strategy="zero3")
    with pytest.raises(UserError, match="--devices 0,7: there is no 7; there are 0"):
        trainer(gpu_ids=[0, 7]).train(str(folder / "rows.jsonl"), **OPTIONS)
    tokenizer = load_tokenizer(open_checkpoint(str(folder / "model")))
    tokenizer.chat_template = "{{ messages }}"
    with pytest.raises(UserError, match="tokenizer: its chat template differ"):
        trainer().train(rows, tokenizer)
    assert not (tmp_path / "run").exists()


def test_to_import_the_package_imports_no_jax():
    script = (
        "import sys, zagora_jax; print('jax' in sys.modules, 'numpy' in sys.modules, 'Trainer' in str(dir(zagora_jax)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True"]
    with pytest.raises(AttributeError, match="has no attribute 'Foo'"):
        zagora_jax.Foo  # noqa: B018


def of_domain(folder, config=None, **given):
    config = config or {"base_model": folder / "model", "domain_data": "rows.jsonl"}
    return zagora_jax.DomainAdaptationTrainer(config, **given)


WRONG = {
    "a number of cards": (
        lambda f: distributed(f, gpu_ids=2),
        r"gpu_ids: expected a list of numbers, such as \[0, 1\], found 2",
    ),
    "cards in a text": (lambda f: distributed(f, gpu_ids="0,1"), "gpu_ids: expected a list of numbers"),
    "no model": (lambda _: zagora_jax.DistributedTrainer(None), "model_name: model: expected a text, found null"),
    "one callback": (lambda f: distributed(f, callbacks=Callback()), "callbacks: expected a list of objects of"),
    "a class as callback": (lambda f: distributed(f, callbacks=[Callback]), "callbacks: expected a list of objects of"),
    "no prompts": (
        lambda f: distributed(f, samples={"prompts": []}),
        "samples.prompts: expected a list that is not empty",
    ),
    "no run": (
        lambda _: zagora_jax.DistributedTrainer.from_run(None),
        "from_run: expected a run directory, found NoneType",
    ),
    "no dict": (lambda f: of_domain(f, ["base_model"]), "config: expected a dict, found list"),
    "a text of cards": (lambda f: of_domain(f, gpu_count="4"), "gpu_count: expected 1 or more, found '4'"),
    "another size": (
        lambda f: of_domain(f, {"base_model": f, "domain_data": "rows", "batch_size_per_gpu": 0}),
        "config: batch_size_per_gpu: micro_batch_size: expected at least 1, found 0",
    ),
    "another name of the model": (
        lambda f: of_domain(f, {"base_model": f, "domain_data": "rows", "basemodel": "m"}),
        r"config: basemodel: has no counterpart here; did you mean base_model\?",
    ),
    "no rows": (
        lambda f: distributed(f).train(),
        "^train: dataset is required: files, rows as dicts, or a data set",
    ),
    "no tokenizer": (
        lambda f: distributed(f).train(["rows.jsonl"], tokenizer="gpt2"),
        "tokenizer: expected one of transformers, found str",
    ),
    "half a character": (
        lambda f: distributed(f).train([{"text": "\ud800"}]),
        "data, row 1: expected text, numbers and lists: .*surrogates not allowed",
    ),
    "one text to embed": (
        lambda f: embedder(f).embed("a text"),
        "texts: expected a list of texts, found str; put it into",
    ),
    "a number to embed": (lambda f: embedder(f).embed(["a", 1]), "texts, item 2: expected a text, found int"),
    "one pair a step": (
        lambda f: embedder(f).train([{"query": "a", "positive": "b"}]),
        "an optimizer step has one of the 1 pairs, and no other passage to tell its own from",
    ),
    "one passage": (
        lambda _: zagora_jax.PassageIndex(lambda texts: texts, "abc"),
        "passages: expected a list of texts",
    ),
}


def test_options_of_the_constructor_may_have_their_own_names(folder):
    config = distributed(folder, devices=[0], strategy="streaming").config
    assert (config.devices, config.strategy) == ([0], "streaming")
    with pytest.raises(UserError, match=r"strategy is given twice: 'fsdp' .*partition_strategy. and 'streaming'"):
        distributed(folder, partition_strategy="fsdp", strategy="streaming")


def distributed(folder, **given):
    output = {"output": str(folder / "wrong"), "reporter": recorder()[0]}
    return zagora_jax.DistributedTrainer(folder / "model", **output, **given)


def embedder(folder):
    return zagora_jax.EmbeddingTrainer(
        folder / "model", output=str(folder / "wrong"), quantized_cache="off", reporter=recorder()[0]
    )


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_gets_an_answer(name, folder):
    attempt, message = WRONG[name]
    with pytest.raises(UserError, match=message):
        attempt(folder)
    assert not (folder / "wrong" / "config.yaml").exists()
