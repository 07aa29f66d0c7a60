"""Trainers for programs and notebooks: faces of `zagora_jax.trainer.train`, which the command line runs too."""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from zagora_jax.callbacks import Callback
from zagora_jax.commands import EvaluateConfig, ExportConfig
from zagora_jax.config import TrainConfig
from zagora_jax.data.in_memory import Dataset, sources_of, texts_of
from zagora_jax.errors import UserError
from zagora_jax.evaluate_run import evaluate_run
from zagora_jax.exporter import export
from zagora_jax.generation import Generator, Sampling, open_generator
from zagora_jax.options import Given, build
from zagora_jax.reporting.progress import Reporter
from zagora_jax.reporting.steps import Steps
from zagora_jax.run_directory import RunDirectory, read_metrics
from zagora_jax.trainer import TrainResult, train
from zagora_jax.training_arguments import Arguments, as_options, merged, own_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Trainer:
    """A run, from its options to what can be done with its result."""

    def __init__(
        self, options: Mapping[str, Given], callbacks: Sequence[Callback] = (), reporter: Reporter | None = None
    ):
        """Keep options of `TrainConfig` by name, each with where it was given."""
        if not isinstance(callbacks, Iterable) or not all(isinstance(one, Callback) for one in callbacks):
            raise UserError(
                f"{type(self).__name__}: callbacks: expected a list of objects of zagora_jax.callbacks.Callback, found "
                f"{callbacks!r}"
            )
        self._options, self._callbacks, self._reporter = dict(options), tuple(callbacks), reporter or Reporter()
        self.config = build(TrainConfig, _without_data(self._options))

    @classmethod
    def from_run(cls, run: str | Path, *, callbacks: Sequence[Callback] = (), reporter: Reporter | None = None) -> Self:
        """Take up a run that is there, with its options: to use its result, or to go on with `resume`.

        Raises:
            UserError: there is none.
        """
        if not isinstance(run, str | Path):
            raise UserError(f"{cls.__name__}.from_run: expected a run directory, found {type(run).__name__}")
        directory = RunDirectory(run)
        recorded = directory.read_config().model_dump(exclude_defaults=True) | {"output": directory.path.absolute()}
        trainer = cls.__new__(cls)
        Trainer.__init__(trainer, own_options(recorded, str(directory.config)), callbacks, reporter)
        return trainer

    @property
    def run_directory(self) -> Path:
        """Where the run is, or will be."""
        return self.config.output

    @property
    def history(self) -> Steps:
        """The numbers of every finished optimizer step, first to last: a list that can be drawn."""
        return Steps(read_metrics(RunDirectory(self.run_directory).metrics))

    def evaluate(self, dataset: Dataset | None = None, *, checkpoint: int | None = None) -> dict[str, float]:
        """Measure the mean loss over rows.

        Args:
            dataset: the rows; those that the run held out where not given.
            checkpoint: the step whose adapter is measured; else the one in adapter/.

        Returns:
            eval_loss, the number of eval_supervised_tokens that it is the mean over, and what else was measured.
        """
        self._require_run("evaluate")
        with tempfile.TemporaryDirectory() as folder:
            data = None if dataset is None else sources_of(dataset, Path(folder), "dataset", "test")
            given = EvaluateConfig(run=self.run_directory, data=data, checkpoint=checkpoint)
            result = evaluate_run(given, self._reporter)
        return {
            "eval_loss": result.loss,
            "eval_supervised_tokens": result.supervised_tokens,
            **{f"eval_{name}": value for name, value in result.numbers.items()},
        }

    def save_adapter(self, to: str | Path, *, checkpoint: int | None = None, overwrite: bool = False) -> Path:
        """Write the adapter in PEFT's format, with the tokenizer, to the folder `to`; see the command `export`."""
        return self._export(to, format="adapter", checkpoint=checkpoint, overwrite=overwrite)

    def export_merged(
        self, to: str | Path, *, base: str = "original", checkpoint: int | None = None, overwrite: bool = False
    ) -> Path:
        """Write the model with the adapter merged in as Hugging Face files to the folder `to`; see `export`."""
        return self._export(to, format="merged", base=base, checkpoint=checkpoint, overwrite=overwrite)

    def _export(self, to: str | Path, **options: Any) -> Path:
        self._require_run("export")
        given = {"run": self.run_directory, "to": Path(to), **options}
        config = build(ExportConfig, {name: Given(value, f"export: {name}") for name, value in given.items()})
        return export(config, self._reporter).directory

    def _require_run(self, what: str) -> None:
        if not RunDirectory(self.run_directory).is_run():
            raise UserError(f"{what}: nothing is trained in {self.run_directory} yet: call train() first")

    def _train(self, given: Mapping[str, Given]) -> TrainResult:
        """Train with these options; see `zagora_jax.trainer.train`."""
        self.config = build(TrainConfig, given)
        return train(self.config, self._reporter, self._callbacks)

    def _fit(
        self,
        dataset: Dataset | None,
        eval_dataset: Dataset | None,
        tokenizer: "PreTrainedTokenizerBase | None",
        training_args: Arguments,
        arguments: Mapping[str, Any],
    ) -> TrainResult:
        """Train with further arguments; see `DistributedTrainer.train`."""
        of_object = as_options(training_args)
        given = merged(of_object.given, as_options(arguments, "train").given)
        given = {**of_object.usual, **merged(self._options, given)}
        if dataset is None and "data" not in given:
            raise UserError("train: dataset is required: files, rows as dicts, or a data set of the library datasets")
        early = build(TrainConfig, _without_data(given))
        if tokenizer is not None:
            require_own_tokenizer(tokenizer, early.model)
        folder = self._folder_of_rows(early)
        for option, rows, split in (("data", dataset, "train"), ("eval_data", eval_dataset, "test")):
            if rows is not None:
                sources = sources_of(rows, folder, option, split)
                given = merged(given, {option: Given(sources, f"train: {option}")})
        return self._train(given)

    @staticmethod
    def _folder_of_rows(config: TrainConfig) -> Path:
        """Return where rows from memory are to be written, of a run that may be begun."""
        if not config.resume:
            RunDirectory(config.output).require_free()
        return config.output / "data"


class GeneratingTrainer(Trainer):
    """A run of a language model."""

    _generator: Generator | None = None

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        chat: bool = True,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Any:
        """Answer prompts with the tuned model, which stays on a device until the next training.

        Args:
            prompts: one, or several.
            chat: put each in the chat template as the user's; else they are continued as they are.
            max_new_tokens: tokens of an answer at most.
            temperature: of sampling; 0 takes the likeliest token.
            seed: of sampling.

        Returns:
            The text for one prompt, a list of texts for several.
        """
        self._require_run("generate")
        if self._generator is None:
            self._generator = open_generator(str(self.run_directory))
        several = [prompts] if isinstance(prompts, str) else texts_of(prompts, "prompts")
        ask = self._generator.answer if chat else self._generator.complete
        texts = ask(several, Sampling(max_new_tokens, temperature, seed))
        return texts[0] if isinstance(prompts, str) else texts

    def _train(self, given: Mapping[str, Given]) -> TrainResult:
        self._generator = None
        return super()._train(given)


class DistributedTrainer(GeneratingTrainer):
    """Fine-tunes a model with LoRA over the devices of this machine.

    ```
    trainer = DistributedTrainer("path/to/model", gpu_ids=[0, 1], partition_strategy="layerwise")
    trainer.train(rows, training_args={"num_train_epochs": 1, "learning_rate": 1e-4, "bf16": True})
    print(trainer.generate("Who is the captain?"))
    ```
    """

    def __init__(
        self,
        model_name: str | Path,
        gpu_ids: Sequence[int] | None = None,
        partition_strategy: str | None = None,
        gradient_accumulation_steps: int | None = None,
        *,
        callbacks: Sequence[Callback] = (),
        reporter: Reporter | None = None,
        **options: Any,
    ):
        """Take the options that hold for every training.

        Args:
            model_name: as the option model: a folder, a hub id, a GGUF file.
            gpu_ids: the numbers of the devices, as the option devices; all where not given.
            partition_strategy: as the option strategy; auto where not given.
            gradient_accumulation_steps: micro-batches in an optimizer step.
            callbacks: are told what happens, see `zagora_jax.callbacks`.
            reporter: prints the run's story.
            **options: of `zagora_jax.config.TrainConfig`; groups as dicts, lora={"rank": 8}.

        Raises:
            UserError: an option is wrong.
        """
        given = constructed(
            type(self).__name__, model_name, gpu_ids, partition_strategy, gradient_accumulation_steps, options
        )
        super().__init__(given, callbacks, reporter)

    def train(
        self,
        dataset: Dataset | None = None,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        training_args: Arguments = None,
        *,
        eval_dataset: Dataset | None = None,
        **arguments: Any,
    ) -> TrainResult:
        """Train an adapter.

        Args:
            dataset: files, rows as dicts, or a data set of the library `datasets` (of several splits, "train"). Rows
                in memory are written into the run directory, from where a resumption reads them.
            tokenizer: the model's own, which is read from its folder; any other is refused.
            training_args: transformers.TrainingArguments, or a dict of such names or of options here.
            eval_dataset: rows held out, like `dataset`.
            **arguments: more training arguments, by name.

        Returns:
            Where the run is, and its losses before and after.

        Raises:
            UserError: see `zagora_jax.trainer.train`; or an argument has no meaning here.
        """
        return self._fit(dataset, eval_dataset, tokenizer, training_args, arguments)


def constructed(
    where: str,
    model_name: str | Path,
    gpu_ids: Sequence[int] | None,
    partition_strategy: str | None,
    gradient_accumulation_steps: int | None,
    options: Mapping[str, Any],
) -> dict[str, Given]:
    """Return the options that a trainer's constructor is given; `where` is its name.

    Raises:
        UserError: an option does not exist.
    """
    if gpu_ids is not None and (isinstance(gpu_ids, str) or not isinstance(gpu_ids, Iterable)):
        raise UserError(f"{where}: gpu_ids: expected a list of numbers, such as [0, 1], found {gpu_ids!r}")
    model = str(model_name) if isinstance(model_name, Path) else model_name
    named = {
        "model": Given(model, f"{where}: model_name"),
        "devices": Given(None if gpu_ids is None else list(gpu_ids), f"{where}: gpu_ids"),
        "strategy": Given(partition_strategy, f"{where}: partition_strategy"),
        "gradient_accumulation_steps": Given(gradient_accumulation_steps, f"{where}: gradient_accumulation_steps"),
    }
    given = {name: item for name, item in named.items() if name == "model" or item.value is not None}
    return merged(given, own_options(options, where))


# What can only be judged beside the rows.
_OF_DATA = {"data_weights", "eval_every", "keep_best", "early_stopping.patience"}


def _without_data(options: Mapping[str, Given]) -> dict[str, Given]:
    return {name: item for name, item in options.items() if name not in _OF_DATA}


def require_own_tokenizer(tokenizer: "PreTrainedTokenizerBase", model: str) -> None:
    """Refuse a tokenizer that is not the model's own: rows, generation and export all read that from its files.

    Raises:
        UserError: says what differs.
    """
    from zagora_jax.checkpoints import load_tokenizer, open_checkpoint

    if not hasattr(tokenizer, "get_vocab"):
        raise UserError(f"tokenizer: expected one of transformers, found {type(tokenizer).__name__}; leave it out")
    own = load_tokenizer(open_checkpoint(model))
    differing = [
        what
        for what, of in (
            ("vocabulary", lambda one: one.get_vocab()),
            ("chat template", lambda one: one.chat_template),
            ("end-of-text token", lambda one: one.eos_token),
        )
        if of(tokenizer) != of(own)
    ]
    if differing:
        raise UserError(
            f"tokenizer: its {' and '.join(differing)} differ from those of {model}, which rows are read with: save it "
            "into a copy of the model's folder with save_pretrained(), and give that as model_name; or leave it out"
        )
