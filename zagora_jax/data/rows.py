"""What a row says: six shapes that data sets come in, recognised row by row, as five forms.

| keys of the row | form |
|---|---|
| `text` | `PlainText` |
| `messages`: turns of `role` and `content`; optionally `system`, `tools` | `Conversation` |
| `conversations`: turns of `from` and `value`; optionally `system`, `tools` | `Conversation` |
| `prompt`, `completion` | `Completion` |
| `instruction`, `output`; optionally `input` | `Instruction` |
| `input_ids`; optionally `labels`, `attention_mask`, `weights` | `TokenRow` |

Each may have a `weight`, which its supervised tokens count by in the loss (1 where there is none). Turns may use either
convention, also within one row (`turns.py`). A null value counts as absent, so that a Parquet table can hold several
shapes. Keys in `METADATA_KEYS` are ignored; any other key is refused, since ignoring one that changes what the row says
would train on something else than the data set means.

A conversation may begin with the assistant (if the model's chat template allows it) and may end with a user turn,
which is rendered and gives no supervised tokens.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from zagora_jax.data.sources import Location, SourceRow, describe
from zagora_jax.data.turns import METADATA_KEYS, Turn, read_text, read_tools, read_turn, read_weight
from zagora_jax.errors import UserError

SHAPES: dict[str, tuple[set[str], set[str]]] = {  # required keys, optional keys
    "text": ({"text"}, set()),
    "messages": ({"messages"}, {"system", "tools"}),
    "conversations": ({"conversations"}, {"system", "tools"}),
    "completion": ({"prompt", "completion"}, set()),
    "instruction": ({"instruction", "output"}, {"input"}),
    "tokens": ({"input_ids"}, {"labels", "attention_mask", "weights"}),
}
SHAPES_IN_WORDS = (
    "{text}, {messages: [{role, content}]}, {conversations: [{from, value}]}, {prompt, completion}, "
    "{instruction, input, output} or {input_ids, labels}"
)
IGNORED_LABEL = -100  # of transformers' loss


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text to learn as it stands."""

    text: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns to render with the chat template; the assistant's are learned. `tools` are JSON schemas of functions."""

    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt, and the completion to learn."""

    prompt: str
    completion: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction with an input that may be empty, and the output to learn."""

    instruction: str
    input: str
    output: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class TokenRow:
    """Tokens that another program made: ids int32[n], and the weight of each in the loss float32[n]."""

    tokens: np.ndarray
    weights: np.ndarray


Form = PlainText | Conversation | Completion | Instruction | TokenRow


def interpret(row: SourceRow) -> Form:
    """Recognises the shape of a row.

    Raises:
        UserError: no shape or more than one fits, a value is not of its kind, or a role is unknown.
    """
    value, location = row
    shape = _shape(value, location)
    weight = read_weight(value.get("weight"), location, "weight")
    match shape:
        case "text":
            return PlainText(read_text(value["text"], location, "text"), weight)
        case "completion":
            prompt, completion = (read_text(value[key], location, key) for key in ("prompt", "completion"))
            return Completion(prompt, completion, weight)
        case "instruction":
            given = {"input": "", **{key: item for key, item in value.items() if item is not None}}
            instruction, request, output = (
                read_text(given.get(key), location, key) for key in ("instruction", "input", "output")
            )
            return Instruction(instruction, request, output, weight)
        case "tokens":
            return _token_row(value, location, weight)
        case key:
            return _conversation(value, key, location, weight)


def _shape(value: dict[str, Any], location: Location) -> str:
    keys = value.keys() - METADATA_KEYS - {"weight"}
    given = {key for key in keys if value[key] is not None}
    fitting = [
        name for name, (required, optional) in SHAPES.items() if required <= keys and given <= required | optional
    ]
    if len(fitting) == 1:
        return fitting[0]
    found = ", ".join(f"{key} (null)" if value[key] is None else key for key in value) or "no keys"
    raise UserError(
        f"{location}: expected the keys of one shape, {SHAPES_IN_WORDS}, found {found}; rename the keys or remove "
        "those that do not belong to the shape"
    )


def _conversation(value: dict[str, Any], key: str, location: Location, weight: float) -> Conversation:
    entries = value[key]
    if not isinstance(entries, list):
        raise UserError(f"{location}, field {key}: expected a list of turns, found {describe(entries)}")
    if not entries:
        raise UserError(f"{location}, field {key}: expected at least one turn, found an empty list")
    turns = [read_turn(entry, location, f"{key}[{index}]") for index, entry in enumerate(entries)]
    weights = [
        read_weight(turn.weight * weight, location, f"{key}[{index}].weight, times the row's weight")
        for index, turn in enumerate(turns)
    ]
    turns = [replace(turn, weight=weight) for turn, weight in zip(turns, weights, strict=True)]
    system = value.get("system")
    if system is not None and read_text(system, location, "system"):
        if turns[0].role == "system":
            raise UserError(f"{location}: expected one system text, found both the key system and a first system turn")
        turns.insert(0, Turn("system", system))
    return Conversation(tuple(turns), read_tools(value.get("tools"), location))


def _token_row(value: dict[str, Any], location: Location, weight: float) -> TokenRow:
    """Reads tokens; those that `labels` ignores (-100) or `weights` gives 0 are not supervised."""
    tokens = _numbers(value["input_ids"], location, "input_ids", None)
    weights = np.full(len(tokens), weight, np.float32)
    if (labels := value.get("labels")) is not None:
        labels = _numbers(labels, location, "labels", len(tokens))
        ignored = labels == IGNORED_LABEL
        if wrong := np.flatnonzero(~ignored & (labels != tokens)).tolist():
            raise UserError(
                f"{location}, field labels[{wrong[0]}]: expected {tokens[wrong[0]]}, as in input_ids, or "
                f"{IGNORED_LABEL}, found {labels[wrong[0]]}; labels are not shifted"
            )
        weights[ignored] = 0
    if (given := value.get("weights")) is not None:
        weights *= _numbers(given, location, "weights", len(tokens), whole=False)
        read_weight(float(weights.max(initial=0)), location, "weights, times the row's weight")
    if (mask := value.get("attention_mask")) is not None:
        real = _numbers(mask, location, "attention_mask", len(tokens)) != 0
        kept = np.flatnonzero(real)
        if len(kept) and not real[kept[0] : kept[-1] + 1].all():
            raise UserError(f"{location}, field attention_mask: expected zeros at the ends alone, found some between")
        tokens, weights = tokens[real], weights[real]
    return TokenRow(tokens.astype(np.int32), weights)


def _numbers(value: Any, location: Location, field: str, count: int | None, whole: bool = True) -> np.ndarray:
    """A list of `count` numbers: int64, or with `whole` false float32 that are not below 0."""
    if not isinstance(value, list):
        raise UserError(f"{location}, field {field}: expected a list of numbers, found {describe(value)}")
    if count is not None and len(value) != count:
        raise UserError(f"{location}, field {field}: expected {count} numbers, one a token, found {len(value)}")
    for index, item in enumerate(value):
        if whole and (type(item) is not int or not -(2**31) <= item < 2**31):
            raise UserError(f"{location}, field {field}[{index}]: expected a whole number, found {describe(item)}")
        if not whole:
            read_weight(item, location, f"{field}[{index}]")
    return np.asarray(value, np.int64 if whole else np.float32)
