"""The options of train: most of the one typed list that YAML, `--help` and docs/options.md are made from."""

import math
import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from zagora_jax.option_groups import (
    BalanceConfig,
    CommandConfig,
    EarlyStoppingConfig,
    Embeddings,
    FilePath,
    FloatType,
    Indices,
    LoraConfig,
    MeshConfig,
    Numbers,
    OffloadConfig,
    Quantization,
    QuantizedCacheFolder,
    RetrievalConfig,
    SamplesConfig,
    SitesConfig,
    Sources,
    Texts,
    Trackers,
)


def quantized_folder(option: Path | Literal["auto", "off"]) -> Path | None:
    """Return the folder that quantized_cache says, by the XDG base directory specification for auto; None for off."""
    if isinstance(option, Path):
        return option
    caches = os.environ.get("XDG_CACHE_HOME", "")
    default = Path(caches) if os.path.isabs(caches) else Path.home() / ".cache"
    return None if option == "off" else default / "zagora-jax" / "quantized"


def _absolute(value: Any) -> Any:
    return value.absolute() if isinstance(value, Path) else value


def _named_source(entry: str) -> tuple[str, str]:
    name, _, source = entry.partition("=")
    return name.strip(), os.path.expanduser(source.strip())


def _run_of_model(fields: dict[str, Any]) -> Path:
    """Name the run after the last part of the model's name, as in `org/Llama-8B` or `~/llama-8b.gguf`."""
    name = fields["model"].rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")
    return Path("runs") / (re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run")


class TrainConfig(CommandConfig):
    """Fine-tune a Llama-family model with LoRA on a frozen base."""

    command = "train"
    headings: ClassVar[dict[str, str]] = {
        "model": "Model",
        "lora.rank": "Adapter",
        "data": "Data",
        "micro_batch_size": "Batches and steps",
        "learning_rate": "Optimizer",
        "compute_dtype": "Computation",
        "strategy": "Devices",
        "sites.folder": "Sites",
        "output": "Run",
    }

    model: str = Field(
        min_length=1,
        description="The base model: a Hugging Face directory, a hub id, a Llama GGUF file, or synthetic:NAME "
        "(random weights of a known size, such as synthetic:llama-3-8b?layers=4) for plans and benchmarks.",
    )
    quantization: Quantization = Field(
        default="nf4",
        description="How the frozen weights are held: nf4 (4 bits, double quantisation), hqq (4 bits with zero points, "
        "fitted: a little more exact and larger), int8 (8 bits) or none (in the type of computation). With nf4, a "
        "checkpoint that bitsandbytes has quantised already keeps its own numbers: nf4 or fp4, also those without "
        "double quantisation.",
    )
    embeddings: Embeddings = Field(
        default="none",
        description="How the input embedding and the output head are held: none (in the type of computation), int8 or "
        "nf4, where memory is short: each row is quantised by itself. Merging takes the original ones.",
    )
    quantized_cache: QuantizedCacheFolder = Field(
        default="auto",
        description="Where quantised layers are kept, so that the next start reads them and quantises nothing: a "
        "folder, auto (zagora-jax/quantized in $XDG_CACHE_HOME or ~/.cache), or off.",
    )
    lora: LoraConfig = LoraConfig()
    adapter: FilePath | None = Field(
        default=None,
        description="A PEFT adapter's directory: training goes on from its weights, with new optimizer state. Its own "
        "settings take the place of the lora options, but for dropout.",
    )

    data: Sources | None = Field(
        None,
        description="The training rows: JSONL, JSON, Parquet or Arrow files (also with .gz or .zst at the end), "
        "patterns such as rows/*.jsonl, folders, or data sets of the Hugging Face hub (OWNER/NAME, OWNER/NAME:SPLIT). "
        "Required, but for a synthetic model, which trains on random tokens.",
    )
    data_weights: Numbers | None = Field(
        default=None,
        description="How often an epoch goes through each entry of data: 2 has every row twice, 0.5 another half of "
        "the rows in every epoch. Where not given: once.",
    )
    eval_data: Sources | None = Field(
        default=None, description="Rows held out, named as those of data. No row of data is held out for it."
    )
    eval_fraction: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="The part of the rows of data to hold out in place of eval_data. Chosen by their content, so that "
        "equal rows stand together and the choice does not change when rows are added.",
    )
    eval_sets: Texts | None = Field(
        default=None,
        description="More rows held out, in sets with a loss each: NAME=SOURCE, such as medical=medical.jsonl; several "
        "of one name are one set. Without eval_data and eval_fraction, eval_loss is that of all sets together.",
    )
    sequence_length: int = Field(
        default=2048, ge=2, description="Tokens in a row at most, and of the rows packed together."
    )
    long_rows: Literal["cut", "split", "refuse"] = Field(
        default="cut",
        description="What becomes of rows longer than sequence_length: cut (off at their end), split (plain text in "
        "parts; chats are cut), or refuse.",
    )
    overlap: int = Field(
        default=1,
        ge=1,
        description="With split: tokens that a part repeats of the one before it, as context that is not supervised.",
    )
    max_left_out: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Rows without a supervised token are left out; more than this part of all rows is an error.",
    )
    packing: bool = Field(
        default=False, description="Put several short rows in one sequence; they never see each other."
    )

    retrieval: RetrievalConfig = RetrievalConfig()

    micro_batch_size: int = Field(default=1, ge=1, description="Rows for each replica (data x fsdp) and micro-batch.")
    gradient_accumulation_steps: int = Field(default=8, ge=1, description="Micro-batches in an optimizer step.")
    epochs: int = Field(default=1, ge=1, description="Passes over the training rows.")
    max_steps: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps; where given, epochs does not count, but for a synthetic model: its rows are so "
        "few that the steps go through them that often.",
    )

    learning_rate: float = Field(
        default=2e-4, gt=0, description="The highest learning rate, reached after the warm-up."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="cosine", description="The learning rate after the warm-up; linear and cosine end at 0."
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="Optimizer steps over which the learning rate rises linearly."
    )
    warmup_ratio: float = Field(
        default=0.0, ge=0, lt=1, description="The same as a part of all steps, rounded up, in place of warmup_steps."
    )
    optimizer: Literal["adamw", "adamw_8bit"] = Field(
        default="adamw", description="AdamW with 32-bit states, or with 8-bit states in blocks."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's decoupled decay of the adapter's weights.")
    max_grad_norm: float = Field(
        default=1.0, ge=0, description="Gradients are clipped to this global norm; 0: no clipping."
    )

    loss_spike_factor: float | None = Field(
        default=None,
        gt=1,
        description="A loss of more than so many times the mean of the last 50 is a spike, once there are 20; its step "
        "changes nothing.",
    )
    loss_spike_action: Literal["skip", "stop"] = Field(
        default="skip", description="What follows a spike: skip (the next step; 5 in a row end the run) or stop."
    )

    compute_dtype: FloatType = Field(
        default="bfloat16",
        description="Type of the activations; float16 (cards before Ampere) scales the loss dynamically.",
    )
    attention: Literal["auto", "chunked", "cudnn", "reference"] = Field(
        default="auto",
        description="The attention kernel: chunked (portable), cudnn (NVIDIA GPUs), reference (holds all scores; "
        "for tests), or auto, which takes the fastest that fits and prints which.",
    )
    remat: Literal["auto", "full", "attention", "mlp", "none", "nested", "stage"] = Field(
        default="auto",
        description="What the backward pass computes again to save memory: full (a layer, from its input), attention "
        "(as full, but attention's results are kept), mlp (as attention, but so are the projections: the feed-forward "
        "block is computed again), none (no matrix product is), nested (also most of the inputs: least device memory "
        "with none on the host, a third slower), or stage (with layerwise: all but the stage's own input, a third "
        "slower). auto: the least of none, mlp, attention and full that the device has room for, or else stage with "
        "layerwise; full with --offload and on a CPU.",
    )
    offload: OffloadConfig = OffloadConfig()
    seed: int = Field(
        default=0, ge=0, lt=2**32, description="Seed of the adapter's first weights, dropout and the row order."
    )

    strategy: Literal["auto", "fsdp", "replicas", "tensor", "layerwise", "streaming"] = Field(
        default="auto",
        description="What the devices that mesh leaves open are for: fsdp (each holds a part of the 4-bit weights, "
        "which are gathered a layer at a time), replicas (each holds all of them), tensor (each computes a part of "
        "every layer), layerwise (each keeps its own consecutive layers, and micro-batches flow through), streaming "
        "(replicas with offload.weights auto, where that is none), or auto, which is fsdp.",
    )
    devices: Indices | None = Field(
        default=None, description="The numbers of the devices to use, in the mesh's order; all where not given."
    )
    coordinator: str | None = Field(
        default=None,
        pattern=r"^(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]]+):[0-9]{1,5}$",
        description="HOST:PORT, a free port of the machine of process 0, at which the processes of a run on several "
        "machines (or on one) find each other. SLURM, Open MPI, Kubernetes and torchrun tell it.",
    )
    process_count: int | None = Field(
        default=None,
        ge=1,
        description="How many processes run this command together; else as a launcher tells, or 1.",
    )
    process_index: int | None = Field(
        default=None, ge=0, description="The number of this process among them, from 0; else as the launcher tells."
    )
    mesh: MeshConfig = MeshConfig()
    stage_layers: Literal["auto"] | Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)] = Field(
        default="auto",
        description="How many layers each stage of layerwise has: a list of numbers, or auto, which times a layer on "
        "each card and makes the slowest stage as fast as the cards' memory allows.",
    )
    stage_form: Literal["auto", "one-jit", "programs"] = Field(
        default="auto",
        description="How the stages of layerwise run: one-jit (equal stages in one program, which share embedding and "
        "head out by words, until layers move), programs (each stage has its own, of any number of layers), or auto, "
        "which is one-jit where nothing is against it, such as unlike cards, unequal stages, or layers in host memory.",
    )
    balance: BalanceConfig = BalanceConfig()
    gradient_compression: Literal["none", "int8", "int4"] = Field(
        default="none",
        description="How gradients travel between devices: as they are, or quantised with error feedback. They cross "
        "data once an optimizer step; fsdp once a micro-batch, since no device holds the gradients of all layers.",
    )
    gradient_exchange: Literal["synchronous", "overlapped", "delayed"] = Field(
        default="synchronous",
        description="When gradients travel: synchronous (over data behind the backward pass, over fsdp behind each "
        "layer's), overlapped (each layer's under the backward pass of the layer below; the numbers are the same), or "
        "delayed (over data under the whole next step, which applies them one step late; over fsdp as overlapped).",
    )

    device_memory_limit: float | None = Field(
        default=None, gt=0, description="GiB of each GPU's memory that may be used at most, for all arrays together."
    )
    plan_check: bool = Field(
        default=True, description="Refuse a run whose compiled step needs more memory than a device has for it."
    )

    sites: SitesConfig = SitesConfig()

    output: FilePath = Field(
        default_factory=_run_of_model,
        description="The run directory. Where not given: runs/ and the last part of the model's name.",
    )
    log_every: int = Field(
        default=10, ge=1, description="Steps between lines on the console; metrics.jsonl has every step."
    )
    profile_step: int | None = Field(
        default=None,
        ge=1,
        description="Trace this optimizer step, into profile/ of the run directory, and print what each device did and "
        "the longest kernels. Not the first, which is slower than others.",
    )
    eval_every: int = Field(
        default=0,
        ge=0,
        description="Steps between evaluations on eval_data; 0: only before the first and after the last step.",
    )
    save_every: int = Field(default=100, ge=1, description="Steps between checkpoints. The last step is always saved.")
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    samples: SamplesConfig = SamplesConfig()
    keep_checkpoints: int = Field(default=2, ge=1, description="The newest checkpoints that are kept.")
    keep_best: bool = Field(
        default=False,
        description="Save and keep the step with the lowest eval_loss too, and end with its adapter in adapter/.",
    )
    stop_grace: float = Field(
        default=60.0,
        gt=0,
        description="Seconds that the present step and its save may take after SIGTERM, SIGINT (Ctrl-C) or SIGHUP.",
    )
    track: Trackers | None = Field(
        default=None,
        description="Send the numbers of every step to tensorboard (files in the run directory), wandb or trackio too; "
        "each needs the extra of its name. A tracker that fails or is away ends no training.",
    )
    pause_above_celsius: float | None = Field(
        default=None,
        gt=0,
        description="Wait between two steps while a card is hotter than so many degrees Celsius, until all are 5 "
        "degrees cooler than that.",
    )
    resume: bool | FilePath = Field(
        default=False,
        description="Go on from the newest checkpoint of output (true), or from the checkpoint at this path.",
    )

    def with_absolute_paths(self) -> Self:
        """Return the same options with all files named absolutely, so that they mean the same in any directory."""
        from zagora_jax.data.locate import absolute  # here, since reading options needs no data library

        def all_absolute(sources: list[str] | None) -> list[str] | None:
            return sources and [absolute(source) for source in sources]

        model = Path(self.model).expanduser()
        return self.model_copy(
            update={
                "model": str(model.absolute()) if model.exists() else self.model,
                "data": all_absolute(self.data),
                "eval_data": all_absolute(self.eval_data),
                "eval_sets": self.eval_sets
                and [f"{name}={absolute(source)}" for name, source in map(_named_source, self.eval_sets)],
                "quantized_cache": _absolute(self.quantized_cache),
                "adapter": self.adapter and self.adapter.absolute(),
                "sites": self.sites.model_copy(update={"folder": self.sites.absolute_folder}),
                "output": self.output.absolute(),
                "resume": _absolute(self.resume),
            }
        )

    @field_validator("eval_sets")
    @classmethod
    def _check_eval_sets(cls, sets: list[str] | None) -> list[str] | None:
        for entry in sets or ():
            name, source = _named_source(entry)
            if not re.fullmatch(r"[A-Za-z][\w-]*", name) or not source:
                raise ValueError(f"expected NAME=SOURCE, such as medical=medical.jsonl ({entry!r})")
        return sets

    @field_validator("remat", mode="before")
    @classmethod
    def _check_remat(cls, remat: Any) -> Any:
        if remat == "offload":
            raise ValueError("expected full with --offload.activations true, which is what offload was")
        return remat

    @model_validator(mode="after")
    def _check_data(self) -> Self:
        if self.offload.embedding and self.strategy != "layerwise":
            raise ValueError("offload.embedding is for strategy layerwise, whose first card alone needs the embedding")
        if self.eval_every and not (self.eval_data or self.eval_fraction or self.eval_sets):
            raise ValueError(f"eval_every is {self.eval_every} but there is no eval_data: give eval_data too")
        if not self.eval_every and (self.keep_best or self.early_stopping.patience):
            name = "keep_best" if self.keep_best else "early_stopping.patience"
            raise ValueError(f"{name} goes by the losses of evaluations amid the training: give eval_every too")
        if self.eval_data and self.eval_fraction:
            raise ValueError("eval_data and eval_fraction both say which rows are held out: give one of them")
        if self.data_weights and len(self.data_weights) != len(self.data or []):
            numbers, entries = len(self.data_weights), len(self.data or [])
            raise ValueError(f"data_weights has {numbers} numbers, data has {entries} entries: give each one")
        if self.long_rows != "split" and self.overlap != type(self).model_fields["overlap"].default:
            raise ValueError(f"overlap is {self.overlap} but long_rows is {self.long_rows}: only split has an overlap")
        if self.long_rows == "split" and self.overlap >= self.sequence_length:
            raise ValueError(f"overlap ({self.overlap}) must be below sequence_length ({self.sequence_length})")
        return self

    @property
    def named_eval_sets(self) -> dict[str, list[str]]:
        """The sources of eval_sets by the names of the sets."""
        found: dict[str, list[str]] = {}
        for name, source in map(_named_source, self.eval_sets or ()):
            found.setdefault(name, []).append(source)
        return found

    def warmup_of(self, total_steps: int) -> int:
        """Return the steps of the warm-up in a run of so many, by warmup_steps or, as transformers, warmup_ratio."""
        return self.warmup_steps or math.ceil(self.warmup_ratio * total_steps)

    @property
    def quantized_folder(self) -> Path | None:
        """The folder of the option quantized_cache; None: off."""
        return quantized_folder(self.quantized_cache)

    @property
    def streamed_weights(self) -> str | int:
        """The option offload.weights, which strategy streaming makes auto where it would be none."""
        weights = self.offload.weights
        return "auto" if self.strategy == "streaming" and weights == "none" else weights

    @property
    def planned_remat(self) -> str:
        """The option remat; where it is auto, which is settled on the devices, what keeps least for certain."""
        if self.remat != "auto":
            return self.remat
        if self.strategy != "layerwise" or self.streamed_weights != "none":
            return "full"
        return "full" if self.offload.activations and self.stage_form != "one-jit" else "stage"

    @model_validator(mode="after")
    def _check_samples(self) -> Self:
        if self.samples.prompts is None:
            if self.samples.every:
                raise ValueError(
                    f"samples.every is {self.samples.every} but there are no samples.prompts: give them too"
                )
            return self
        against = {
            "retrieval.pooling": self.retrieval.pooling != "none",
            "a synthetic model": self.model.startswith("synthetic:"),
        }
        for what, given in against.items():
            if given:
                raise ValueError(f"samples.prompts does not go with {what}")
        return self

    @model_validator(mode="after")
    def _check_retrieval(self) -> Self:
        if self.retrieval.pooling == "none":
            return self
        against = {
            "strategy layerwise": self.strategy == "layerwise",
            "offload.weights and strategy streaming": self.streamed_weights != "none",
            "packing": self.packing,
            "data_weights": self.data_weights is not None,
            "a synthetic model": self.data is None and self.model.startswith("synthetic:"),
        }
        for what, given in against.items():
            if given:
                raise ValueError(f"retrieval.pooling {self.retrieval.pooling} does not go with {what}")
        return self

    @model_validator(mode="after")
    def _check_sites(self) -> Self:
        if self.sites.folder and self.lora.initialization != "default":
            raise ValueError(
                f"sites.folder does not go with lora.initialization {self.lora.initialization}, with which each site "
                "would take a part of its own out of the weights"
            )
        if self.sites.share and self.retrieval.pooling != "none":
            raise ValueError("sites.share does not go with retrieval.pooling: give each site a file of its own")
        return self

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.streamed_weights != "none" and self.planned_remat != "full":
            raise ValueError(
                f"offload.weights and strategy streaming do not go with remat {self.remat}: a streamed layer is "
                "computed again from its input; use remat full"
            )
        if self.lora.initialization == "loftq" and self.quantization == "none":
            raise ValueError(
                "lora.initialization loftq begins with what quantisation loses, and quantization none loses nothing"
            )
        source = self.offload.weights_from
        if source not in ("auto", "host") and self.streamed_weights == "none":
            raise ValueError(
                f"offload.weights_from {source}: no layer is streamed; give offload.weights auto, all or a number"
            )
        if source not in ("auto", "host") and self.quantized_cache == "off":
            raise ValueError(
                f"offload.weights_from {source} reads the files of the cache of quantised layers, and quantized_cache "
                "is off: give it a folder, or auto"
            )
        if self.offload.activations and self.remat == "nested":
            raise ValueError(
                "offload.activations does not go with remat nested, which keeps no layer inputs in one stack: give "
                "another remat"
            )
        if self.strategy == "layerwise" and self.remat == "nested":
            raise ValueError(
                "remat nested does not go with strategy layerwise, whose stages have other numbers of layers than the "
                "model: give remat stage, with offload.activations where memory is short"
            )
        if self.strategy != "layerwise" and self.remat == "stage":
            raise ValueError(
                "remat stage is for strategy layerwise, where stages have their backward pass later: give remat full"
            )
        given = [name for name in ("stage_layers", "stage_form") if getattr(self, name) != "auto"]
        given += ["balance"] if self.balance != BalanceConfig() else []
        if given and self.strategy != "layerwise":
            raise ValueError(f"{given[0]} is for strategy layerwise: leave it out, or give strategy layerwise too")
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("warmup_steps and warmup_ratio both say how long the warm-up is: give one of them")
        if self.devices is not None and len(set(self.devices)) < len(self.devices):
            raise ValueError(f"devices names one twice: {', '.join(map(str, self.devices))}")
        if self.max_steps is not None and self.warmup_steps >= self.max_steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be below max_steps ({self.max_steps})")
        return self
