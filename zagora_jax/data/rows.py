"""What a row says: five shapes that data sets come in, recognised row by row, as four forms.

| keys of the row | form |
|---|---|
| `text` | `PlainText` |
| `messages`: turns of `role` and `content`; optionally `system` | `Conversation` |
| `conversations`: turns of `from` and `value`; optionally `system` | `Conversation` |
| `prompt`, `completion` | `Completion` |
| `instruction`, `output`; optionally `input` | `Instruction` |

Turns may use either convention, also within one row. A null value counts as absent, so that a Parquet table can hold
several shapes. Keys in `METADATA_KEYS` are ignored; any other key is refused, since ignoring one that changes what the
row says would train on something else than the data set means.

A conversation may begin with the assistant (if the model's chat template allows it) and may end with a user turn,
which is rendered and gives no supervised tokens.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from zagora_jax.data.sources import Location, SourceRow, describe
from zagora_jax.errors import UserError

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
}

SHAPES = {  # required keys, optional keys
    "text": ({"text"}, set()),
    "messages": ({"messages"}, {"system"}),
    "conversations": ({"conversations"}, {"system"}),
    "completion": ({"prompt", "completion"}, set()),
    "instruction": ({"instruction", "output"}, {"input"}),
}
SHAPES_IN_WORDS = (
    "{text}, {messages: [{role, content}]}, {conversations: [{from, value}]}, {prompt, completion} or "
    "{instruction, input, output}"
)

METADATA_KEYS = frozenset(
    {"id", "idx", "index", "uuid", "hash", "source", "dataset", "split", "category", "topic", "title", "url"}
    | {"language", "lang", "tags", "license", "author", "model", "timestamp", "metadata", "meta"}
)


class Turn(NamedTuple):
    """One turn; `role` is system, user, assistant or tool."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text to learn as it stands."""

    text: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns to render with the chat template; the assistant's are learned."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt, and the completion to learn."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction with an input that may be empty, and the output to learn."""

    instruction: str
    input: str
    output: str


Form = PlainText | Conversation | Completion | Instruction


def interpret(row: SourceRow) -> Form:
    """Recognises the shape of a row.

    Raises:
        UserError: no shape or more than one fits, a value is not text, or a role is unknown.
    """
    value, location = row
    match _shape(value, location):
        case "text":
            return PlainText(_text(value["text"], location, "text"))
        case "completion":
            return Completion(*(_text(value[key], location, key) for key in ("prompt", "completion")))
        case "instruction":
            given = {"input": "", **{key: item for key, item in value.items() if item is not None}}
            return Instruction(*(_text(given.get(key), location, key) for key in ("instruction", "input", "output")))
        case key:
            return _conversation(value, key, location)


def _shape(value: dict[str, Any], location: Location) -> str:
    keys = value.keys() - METADATA_KEYS
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


def _conversation(value: dict[str, Any], key: str, location: Location) -> Conversation:
    entries = value[key]
    if not isinstance(entries, list):
        raise UserError(f"{location}, field {key}: expected a list of turns, found {describe(entries)}")
    if not entries:
        raise UserError(f"{location}, field {key}: expected at least one turn, found an empty list")
    turns = [_turn(entry, location, f"{key}[{index}]") for index, entry in enumerate(entries)]
    system = value.get("system")
    if system is not None and _text(system, location, "system"):
        if turns[0].role == "system":
            raise UserError(f"{location}: expected one system text, found both the key system and a first system turn")
        turns.insert(0, Turn("system", _text(system, location, "system")))
    return Conversation(tuple(turns))


def _turn(entry: Any, location: Location, field: str) -> Turn:
    if not isinstance(entry, dict):
        raise UserError(f"{location}, field {field}: expected a turn, an object, found {describe(entry)}")
    given = {key for key, item in entry.items() if item is not None} - METADATA_KEYS
    for role_key, content_key in (("role", "content"), ("from", "value")):
        if role_key in given and given <= {role_key, content_key}:
            role = _text(entry[role_key], location, f"{field}.{role_key}")
            content = _content(entry.get(content_key), location, f"{field}.{content_key}")
            break
    else:
        found = ", ".join(entry) or "none"
        raise UserError(
            f"{location}, field {field}: expected the keys role and content, or from and value, found {found}"
        )
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise UserError(f"{location}, field {field}.{role_key}: expected one of {known}, found {role!r}")
    return Turn(ROLES[role], content)


def _content(value: Any, location: Location, field: str) -> str:
    """A turn's text: a string, or a list of text parts, which are joined."""
    if not isinstance(value, list):
        return _text(value, location, field)
    texts = []
    for index, part in enumerate(value):
        given = {key: item for key, item in part.items() if item is not None} if isinstance(part, dict) else {}
        if given.keys() != {"type", "text"} or given["type"] != "text":
            kind = f"a part of type {given['type']!r}" if "type" in given else describe(part)
            raise UserError(f"{location}, field {field}[{index}]: expected a part of type 'text', found {kind}")
        texts.append(_text(given["text"], location, f"{field}[{index}].text"))
    return "".join(texts)


def _text(value: Any, location: Location, field: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{location}, field {field}: expected a string, found {describe(value)}")
    return value
