"""What configurations are made of: types of options, and groups that commands share."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator


def _to_path(value: Any) -> Path:
    if isinstance(value, Path) or (isinstance(value, str) and value.strip()):
        return Path(value).expanduser()
    raise ValueError("expected a path")


def _to_source(value: Any) -> str:
    if isinstance(value, Path) or (isinstance(value, str) and value.strip()):
        return os.path.expanduser(value)
    raise ValueError("expected a path or the name of a data set")


def _to_list(value: Any) -> Any:
    return [value] if isinstance(value, str | Path | int | float) and not isinstance(value, bool) else value


FilePath = Annotated[Path, BeforeValidator(_to_path, json_schema_input_type=str)]
Source = Annotated[str, BeforeValidator(_to_source, json_schema_input_type=str)]
Sources = Annotated[
    list[Source], Field(min_length=1), BeforeValidator(_to_list, json_schema_input_type=str | list[str])
]
Numbers = Annotated[
    list[Annotated[float, Field(gt=0)]],
    Field(min_length=1),
    BeforeValidator(_to_list, json_schema_input_type=float | list[float]),
]
Indices = Annotated[
    list[Annotated[int, Field(ge=0)]],
    Field(min_length=1),
    BeforeValidator(_to_list, json_schema_input_type=int | list[int]),
]
Trackers = Annotated[
    list[Literal["tensorboard", "wandb", "trackio"]],
    BeforeValidator(_to_list, json_schema_input_type=str | list[str]),
]
Texts = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(min_length=1),
    BeforeValidator(_to_list, json_schema_input_type=str | list[str]),
]
Quantization = Literal["nf4", "hqq", "int8", "none"]
Embeddings = Literal["none", "int8", "nf4"]
FloatType = Literal["bfloat16", "float16", "float32"]
QuantizedCacheFolder = Annotated[
    Literal["auto", "off"] | FilePath,
    BeforeValidator(lambda value: value if value in ("auto", "off") else _to_path(value), json_schema_input_type=str),
]


class Options(BaseModel):
    """A group of options: typed strictly, closed to unknown names, never changed once made."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class CommandConfig(Options):
    """All options of one command, `python -m zagora_jax.COMMAND`."""

    command: ClassVar[str]
    # The field that is given by its place on the command line. Without one, that place is a YAML file's.
    positional: ClassVar[str | None] = None
    # The fields, first to last, that can be given by their places instead of in that file.
    shorthand: ClassVar[tuple[str, ...]] = ()
    # The option that each heading of the help stands above.
    headings: ClassVar[dict[str, str]] = {}


def _split_pattern(pattern: str) -> tuple[str, str]:
    name, _, value = pattern.rpartition("=")
    return name.strip(), value.strip()


class LoraConfig(Options):
    """The adapter's options."""

    rank: int = Field(
        default=16, ge=1, le=2**16, description="Rank of the two adapter matrices beside each targeted weight."
    )
    alpha: int = Field(
        default=32,
        ge=1,
        le=2**24,
        description="The adapter's output is scaled by alpha / rank, or alpha / sqrt(rank) with use_rslora.",
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Part of the adapter's input that is dropped in training."
    )
    targets: str | list[str] = Field(
        default="all-linear",
        description="The modules that get an adapter: all-linear (every linear one but lm_head), a list of names as "
        "they end (q_proj,v_proj; embed_tokens and lm_head too), or one regular expression that matches whole names.",
    )
    modules_to_save: Texts | None = Field(
        default=None,
        description="Tables and norms that are trained in full, beside the adapters, by how their names end: "
        "embed_tokens, lm_head, norm (all of them), input_layernorm, ... Where the output head is the embedding, both "
        "names mean the one table.",
    )
    use_rslora: bool = Field(default=False, description="Scale by alpha / sqrt(rank): rank-stabilised LoRA.")
    use_dora: bool = Field(
        default=False,
        description="Train the lengths of the weights' rows apart from their directions (DoRA): slower, often better "
        "at low ranks.",
    )
    initialization: Literal["default", "pissa", "loftq"] = Field(
        default="default",
        description="What adapters begin as: nothing (default), the principal part of the weights, which is taken out "
        "of them (pissa), or that of what quantisation loses (loftq).",
    )
    rank_pattern: Texts | None = Field(
        default=None,
        description="Other ranks for some modules, as NAME=RANK; a NAME is a regular expression for the end of a "
        "module's name, such as down_proj or layers.0.mlp.up_proj, and the first that fits counts.",
    )
    alpha_pattern: Texts | None = Field(
        default=None, description="Other alphas for some modules, as NAME=ALPHA, like rank_pattern."
    )
    layers: Indices | None = Field(
        default=None,
        description="The numbers of the layers that get adapters, from 0; all where not given. Not with targets that "
        "are one regular expression, which can choose layers itself.",
    )

    @property
    def rank_patterns(self) -> dict[str, int]:
        """The ranks by pattern."""
        return {name: int(value) for name, value in map(_split_pattern, self.rank_pattern or ())}

    @property
    def alpha_patterns(self) -> dict[str, float]:
        """The alphas by pattern."""
        return {name: float(value) for name, value in map(_split_pattern, self.alpha_pattern or ())}

    @field_validator("rank_pattern", "alpha_pattern")
    @classmethod
    def _check_patterns(cls, patterns: list[str] | None, info: ValidationInfo) -> list[str] | None:
        number = r"[1-9]\d*" if info.field_name == "rank_pattern" else r"\d*\.?\d+"
        for pattern in patterns or ():
            name, value = _split_pattern(pattern)
            if not name or not re.fullmatch(number, value) or float(value) == 0:
                raise ValueError(f"expected NAME=NUMBER with a positive number, such as down_proj=8 ({pattern!r})")
            try:
                re.compile(name)
            except re.error as error:
                raise ValueError(f"expected a regular expression before the = ({pattern!r}: {error})") from None
        return patterns

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        if self.layers is not None and isinstance(self.targets, str) and self.targets != "all-linear":
            raise ValueError("layers does not go with targets that are one regular expression: choose layers in that")
        return self

    @model_validator(mode="after")
    def _check_initialization(self) -> Self:
        if self.initialization != "default" and self.use_dora:
            raise ValueError(f"initialization {self.initialization} does not go with use_dora; leave one of them out")
        return self

    @field_validator("targets")
    @classmethod
    def _check_targets(cls, targets: str | list[str]) -> str | list[str]:
        parts = [targets] if isinstance(targets, str) else targets
        if not parts or not all(part.strip() for part in parts):
            raise ValueError("expected all-linear, a list of module names, or a regular expression")
        if isinstance(targets, str):
            try:
                re.compile(targets)
            except re.error as error:
                raise ValueError(f"expected a regular expression ({error})") from None
        return targets


class MeshConfig(Options):
    """How many devices stand along each axis of the mesh."""

    stage: int | None = Field(
        default=None, ge=1, description="Consecutive blocks of layers, each on devices of its own; for layerwise."
    )
    data: int | None = Field(default=None, ge=1, description="Replicas, each with rows of its own.")
    fsdp: int | None = Field(
        default=None, ge=1, description="Devices that weights, adapters and optimizer state (and rows) are spread over."
    )
    tensor: int | None = Field(
        default=None,
        ge=1,
        description="Devices that compute each layer together, with a part of its heads and feed-forward columns each; "
        "at most the model's key/value heads. They exchange activations several times a layer: for cards with a fast "
        "link.",
    )


class OffloadConfig(Options):
    """What waits in the host's memory until a GPU needs it."""

    embedding: bool = Field(
        default=False,
        description="Look words up in the host's memory and send the first card their rows alone; with strategy "
        "layerwise. A large vocabulary's table is as large as several layers.",
    )

    activations: bool = Field(
        default=False,
        description="Keep what the backward pass does not compute again, such as the layers' inputs, in pinned host "
        "memory until then; not with remat nested.",
    )
    weights: Literal["none", "all", "auto"] | Annotated[int, Field(ge=1)] = Field(
        default="none",
        description="Keep frozen layers in pinned host memory and bring each to the device a layer ahead of its use: "
        "none, all, a number of layers, or as many as the device's memory needs (auto); with remat full. All "
        "micro-batches of a step pass through a layer before the next comes, so that more of them cost no more copies. "
        "With strategy layerwise each card streams its own layers, for each micro-batch; a number is shared out.",
    )
    weights_from: Literal["auto", "host", "disk"] | Annotated[int, Field(ge=3)] = Field(
        default="auto",
        description="Where streamed layers come from: host (memory that has them all), disk (the files of "
        "quantized_cache, read ahead of each layer's use, with room for 4 layers in host memory), a number (the same, "
        "with room for so many), or auto (host where its memory suffices, else disk with as much room as there is). "
        "With strategy layerwise they come from host.",
    )
    optimizer: bool = Field(
        default=False,
        description="Keep the optimizer's moments in pinned host memory between the steps; the update brings in one "
        "layer's at a time.",
    )


class PlannedOffloadConfig(Options):
    """What may wait in the host's memory, in a plan."""

    activations: bool | None = Field(default=None, description="As of train; else searched for.")
    weights: Literal["none", "all", "auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto", description="As of train; auto: searched for, none among others."
    )
    optimizer: bool | None = Field(default=None, description="As of train; else searched for.")


class RetrievalConfig(Options):
    """The training of an embedder: texts that belong together get vectors that point in the same direction."""

    pooling: Literal["none", "last", "mean"] = Field(
        default="none",
        description="What becomes the vector of a text: the last token's hidden state (last), or the mean over all "
        "tokens (mean). Rows are then {query, positive, negatives}; none trains a language model.",
    )
    temperature: float = Field(
        default=0.05, gt=0, description="Scores, cosines from -1 to 1, are divided by this in the loss."
    )
    hard_negatives: int = Field(
        default=0,
        ge=0,
        description="How many of a row's negatives stand beside its passage in a step, whose other passages are wrong "
        "answers too.",
    )
    query_prefix: str = Field(default="", description="What is put before each query, such as 'query: '.")
    passage_prefix: str = Field(default="", description="What is put before each passage.")

    @property
    def texts_of_a_pair(self) -> int:
        """How many sequences stand for a row: its query, its passage and its negatives; 1 of a language model's."""
        return 1 if self.pooling == "none" else 2 + self.hard_negatives


class EarlyStoppingConfig(Options):
    """When a run ends before its last step."""

    patience: int | None = Field(
        default=None,
        ge=1,
        description="End the run behind so many evaluations in a row whose eval_loss was not below the lowest before.",
    )
    min_delta: float = Field(default=0.0, ge=0, description="By how much more than this it must be below.")


class SamplesConfig(Options):
    """What the model in training is asked now and then."""

    prompts: Texts | None = Field(
        default=None,
        description="Prompts to answer before the first step and after the last; for samples.jsonl and report.html.",
    )
    every: int = Field(default=0, ge=0, description="Steps between further answers; 0: none.")
    max_new_tokens: int = Field(default=64, ge=1, description="Tokens of an answer at most; the likeliest are taken.")
    chat: bool = Field(
        default=True,
        description="Put the prompts in the chat template as the user's; false: continue them as they are.",
    )


class BalanceConfig(Options):
    """When layers move between the stages of layerwise, in training."""

    threshold: float = Field(
        default=0.15,
        ge=0,
        lt=1,
        description="The part of a step's time that moving layers away from a slow card must save; 0: none ever moves.",
    )
    patience: int = Field(default=20, ge=1, description="For how many steps in a row it must have promised that.")


class SitesConfig(Options):
    """Several runs, on machines joined by slow links, that make one adapter."""

    folder: str | None = Field(
        default=None,
        min_length=1,
        description="A folder that all sites reach: a path, or a URL that fsspec knows, such as s3://bucket/run. This "
        "run is then one of several sites, each with data of its own, that train by themselves and exchange compressed "
        "outer updates there (DiLoCo).",
    )
    name: str | None = Field(default=None, description="This site's name, which no other one has.")
    every: int = Field(default=50, ge=1, description="Optimizer steps between two exchanges.")
    outer_learning_rate: float = Field(
        default=0.7, gt=0, description="The outer optimizer's learning rate; the same in all sites."
    )
    outer_momentum: float = Field(
        default=0.5, ge=0, lt=1, description="The outer optimizer's Nesterov momentum; the same in all sites."
    )
    compression: Literal["none", "int8", "int4"] = Field(
        default="int8", description="How this site's updates travel: as they are, or quantised with error feedback."
    )
    overlap: bool = Field(
        default=True,
        description="Send and collect while the next steps run, and apply what comes of it behind them, one exchange "
        "late; false: wait for it.",
    )
    wait: float = Field(
        default=600.0,
        gt=0,
        description="Seconds after which a round is closed without the updates that are missing, and after which a "
        "folder that cannot be reached ends the run, which is saved.",
    )
    share: str | None = Field(
        default=None,
        description="Train on a part of the rows of data alone: 2/4 is the second of four parts, which are chosen by "
        "the rows' content and have no row in common. Where not given, data is this site's own.",
    )

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z0-9][\w-]{0,63}", name):
            raise ValueError(f"expected letters, digits, - and _, 64 at most ({name!r})")
        return name

    @field_validator("share")
    @classmethod
    def _check_share(cls, share: str | None) -> str | None:
        if share is not None:
            match = re.fullmatch(r"([1-9]\d{0,5})/([1-9]\d{0,5})", share)
            if match is None or int(match[1]) > int(match[2]):
                raise ValueError(f"expected PART/PARTS, such as 2/4 ({share!r})")
        return share

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.folder is None) != (self.name is None):
            missing = "folder" if self.folder is None else "name"
            raise ValueError(f"sites.folder and sites.name go together: give sites.{missing} too")
        return self

    @property
    def absolute_folder(self) -> str | None:
        """The folder, named so that it means the same in any working directory."""
        if self.folder is None or "://" in self.folder:
            return self.folder
        return os.path.abspath(os.path.expanduser(self.folder))

    @property
    def part(self) -> tuple[int, int]:
        """Which part of how many `share` says, from 0."""
        part, parts = map(int, (self.share or "1/1").split("/"))
        return part - 1, parts
