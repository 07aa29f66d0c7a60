"""The options of the other commands, and all commands: with `zagora_jax.config` the one typed list of options."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from zagora_jax.config import TrainConfig
from zagora_jax.option_groups import (
    CommandConfig,
    Embeddings,
    FilePath,
    FloatType,
    LoraConfig,
    PlannedOffloadConfig,
    Quantization,
    QuantizedCacheFolder,
    Sources,
)


class PreviewConfig(TrainConfig):
    """Show rows as the model will see them. Takes every option of train, so that the same YAML file serves."""

    command = "preview"
    headings: ClassVar[dict[str, str]] = {**TrainConfig.headings, "rows": "Preview"}

    rows: int = Field(default=5, ge=1, description="Sequences to show.")
    colour: Literal["auto", "always", "never"] = Field(
        default="auto", description="Colour supervised tokens: auto (on a terminal), always or never."
    )
    as_json: bool = Field(default=False, alias="json", description="Print one JSON object instead.")


class CheckConfig(TrainConfig):
    """Find what is wrong with a training before a device is used. Takes every option of train."""

    command = "check"
    shorthand = ("model", "data")
    headings: ClassVar[dict[str, str]] = {**TrainConfig.headings, "rows": "Check"}

    rows: int = Field(default=2000, ge=0, description="Rows of each source to read at most; 0: all.")
    as_json: bool = Field(default=False, alias="json", description="Print one JSON object instead.")


class ConfigureConfig(CommandConfig):
    """Tell what fits on given GPUs and how fast, with which settings, before anything is loaded."""

    command = "configure"
    headings: ClassVar[dict[str, str]] = {
        "model_size": "Model",
        "gpu": "Machine",
        "sequence_length": "Training: what is given is kept, the rest is searched for",
        "source": "Plan",
    }

    model_size: str | None = Field(
        default=None, min_length=1, description="A released size by name: 70B, llama-3.1-8b, qwen2.5-32b."
    )
    model: str | None = Field(
        default=None,
        min_length=1,
        description="In place of model_size: a Hugging Face directory (its config.json suffices), a hub id, a GGUF "
        "file, or synthetic:NAME.",
    )
    quantization: Quantization = Field(default="nf4", description="As of train.")
    embeddings: Embeddings | None = Field(
        default=None, description="As of train; else none, or int8 or nf4 where nothing fits without."
    )
    lora: LoraConfig = LoraConfig()

    gpu: str | None = Field(
        default=None, min_length=1, description="The cards, by name: rtx4090, a5000, h100. Else those in this machine."
    )
    gpu_count: int | None = Field(default=None, ge=1, le=64, description="How many; else all in this machine, or 1.")
    memory_per_gpu: float | None = Field(
        default=None,
        gt=0,
        description="GB of each card as sold, or fewer GiB to stay within. Without gpu, the slowest card of that size.",
    )
    interconnect: str | None = Field(
        default=None,
        min_length=1,
        description="What joins the cards: pcie (their own slot), pcie3, pcie4 or pcie5 with -x4, -x8 or -x16, nvlink.",
    )
    links: FilePath | None = Field(
        default=None,
        description="connections.json of a run directory: the rates between cards that train measured there, of which "
        "the slowest counts, take the place of what interconnect says.",
    )
    peer_to_peer: bool | None = Field(
        default=None,
        description="Whether cards reach each other's memory; else yes, but for GeForce cards over PCIe.",
    )
    host_memory: float | None = Field(
        default=None,
        gt=0,
        le=2**20,
        description="GiB of the host; else this machine's. For cards by name, unknown: then what waits in host memory "
        "is the last resort.",
    )
    disk_gb_s: float | None = Field(
        default=None,
        ge=0.001,
        le=1000,
        description="GB/s at which the disk of quantized_cache is read, from which layers come that host memory has no "
        "room for; else as this machine reads the files that are there, or 3.",
    )
    hourly_price: float | None = Field(
        default=None, ge=0, le=1e9, description="What the machine costs an hour, for the total."
    )

    sequence_length: int = Field(default=2048, ge=2, le=2**24, description="Tokens in a row at most.")
    rows_per_step: int | None = Field(
        default=None,
        ge=1,
        le=2**20,
        description="Rows of an optimizer step at least, over all cards and micro-batches. Where not given: 16, or "
        "fewer where layers are streamed and the host has no room for the inputs of so many.",
    )
    micro_batch_size: int | None = Field(
        default=None, ge=1, le=2**20, description="Rows for each replica and micro-batch."
    )
    strategy: str | None = Field(
        default=None, min_length=1, description="A name from the plan's table, such as fsdp or replicas."
    )
    remat: str | None = Field(default=None, min_length=1, description="As of train.")
    offload: PlannedOffloadConfig = PlannedOffloadConfig()
    optimizer: Literal["adamw", "adamw_8bit"] | None = Field(default=None, description="As of train.")
    compute_dtype: FloatType = Field(default="bfloat16", description="As of train.")
    packing: bool = Field(default=False, description="As of train.")
    data: Sources | None = Field(default=None, description="The training rows, to count their tokens.")
    epochs: int = Field(default=1, ge=1, le=2**20, description="Passes over the rows, for the total.")

    source: Literal["auto", "compiled", "analytic"] = Field(
        default="auto",
        description="Where the memory comes from: compiled (the real step, compiled for the cards; needs the extra "
        "plan), analytic (an estimate within 7 % of it, in a second), or auto: compiled where that can be.",
    )
    output: FilePath | None = Field(default=None, description="Write a configuration for train here.")
    as_json: bool = Field(default=False, alias="json", description="Print the plan as JSON.")
    plot: FilePath | None = Field(
        default=None, description="Draw the plan as a picture here (.png, .svg, .pdf); needs the extra plot."
    )
    report: bool = Field(default=False, description="Print what a bug report needs of this machine, and no plan.")

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if not self.report and (self.model is None) == (self.model_size is None):
            raise ValueError("give either model or model_size")
        return self


RunPath = Annotated[FilePath, Field(description="The run directory.")]
Checkpoint = Annotated[int | None, Field(ge=0, description="The step of the checkpoint to use; else the newest.")]


class ExportConfig(CommandConfig):
    """Write a run's result as Hugging Face files."""

    command = "export"
    positional = "run"

    run: RunPath
    to: FilePath = Field(description="The directory to write.")
    format: Literal["merged", "adapter"] = Field(
        default="merged",
        description="merged (the whole model with the adapter added in) or adapter (PEFT files alone).",
    )
    base: Literal["original", "dequantized"] = Field(
        default="original",
        description="The weights that the adapter is added to: the original ones, or those that training saw.",
    )
    dtype: FloatType | None = Field(default=None, description="Type of the merged weights; else that of the source.")
    checkpoint: Checkpoint = None
    overwrite: bool = Field(False, description="Replace an earlier export; nothing else is ever replaced.")

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.format == "adapter" and (self.base != "original" or self.dtype):
            raise ValueError("base and dtype say how to merge: leave them out with format adapter")
        return self


class EvaluateConfig(CommandConfig):
    """Measure a run's loss over rows: sum / count of their supervised tokens."""

    command = "evaluate"
    positional = "run"

    run: RunPath
    data: Sources | None = Field(
        default=None, description="Rows, named as in training; else those that the run held out."
    )
    micro_batch_size: int | None = Field(default=None, ge=1, description="Rows computed at a time; else as the run's.")
    sequence_length: int | None = Field(default=None, ge=2, description="Tokens in a row at most; else as the run's.")
    checkpoint: Checkpoint = None


class GenerateConfig(CommandConfig):
    """Answer prompts with a run's tuned model, or with a base model."""

    command = "generate"
    positional = "model"

    model: str = Field(min_length=1, description="A run directory, or a base model as train takes it.")
    prompt: str | None = Field(default=None, min_length=1, description="The prompt.")
    prompts: FilePath | None = Field(
        default=None, description="A text file with one prompt a line, in place of prompt."
    )
    chat: bool = Field(
        default=True, description="Put the prompt in the chat template as the user's; false: continue it as it is."
    )
    max_new_tokens: int = Field(default=256, ge=1, description="Tokens of an answer at most.")
    temperature: float = Field(default=0.0, ge=0, description="Sampling temperature; 0: always the likeliest token.")
    seed: int = Field(default=0, ge=0, lt=2**32, description="Seed of the sampling.")
    checkpoint: Checkpoint = None
    quantized_cache: QuantizedCacheFolder = Field(
        default="auto", description="As of train, for a base model; a run's own option counts for a run."
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.prompt is None) == (self.prompts is None):
            raise ValueError("give either prompt or prompts")
        return self


class MonitorConfig(CommandConfig):
    """Show the cards of this machine and a run, while it goes on or afterwards."""

    command = "monitor"
    positional = "run"

    run: FilePath = Field(
        default=Path("runs"),
        description="A run directory, or a folder of some, of which the one written last is shown in full.",
    )
    interval: float = Field(default=1.0, ge=0.1, le=3600, description="Seconds between two looks.")
    once: bool = Field(default=False, description="Look once and end, as where the output is no terminal.")
    as_json: bool = Field(default=False, alias="json", description="Look once and print one JSON object instead.")


COMMANDS: tuple[type[CommandConfig], ...] = (
    TrainConfig,
    CheckConfig,
    PreviewConfig,
    ConfigureConfig,
    ExportConfig,
    EvaluateConfig,
    GenerateConfig,
    MonitorConfig,
)
