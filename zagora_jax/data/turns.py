"""Turns of a conversation: who speaks, what is said, the tools that are called, and the weight in the loss."""

from dataclasses import dataclass, field
from typing import Any

from zagora_jax.data.json_rows import parse_text
from zagora_jax.data.sources import Location, describe
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
    "observation": "tool",
}

# Keys of a row or turn that say nothing that is trained on.
METADATA_KEYS = frozenset(
    {"id", "idx", "index", "uuid", "hash", "source", "dataset", "split", "category", "topic", "title", "url"}
    | {"language", "lang", "tags", "license", "author", "model", "timestamp", "metadata", "meta"}
)

# Keys of a turn beside role and content that chat templates read, and the roles that may have them.
TEXT_KEYS = {
    "name": ("user", "assistant", "tool"),
    "tool_call_id": ("tool",),
    "reasoning_content": ("assistant",),
}
CALLS = "tool_calls"
MAX_WEIGHT = 1e6  # more would lose the other tokens in rounding


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn.

    Attributes:
        role: system, user, assistant or tool.
        content: what is said; may be empty where tools are called.
        weight: of the turn's tokens in the loss, if it is the assistant's; 0: the turn is not learned.
        extra: what else the template is given, such as `tool_calls`.
    """

    role: str
    content: str
    weight: float = 1.0
    extra: dict[str, Any] = field(default_factory=dict)

    def message(self) -> dict[str, Any]:
        """The turn as chat templates take it."""
        return {"role": self.role, "content": self.content, **self.extra}


def read_turn(entry: Any, location: Location, place: str) -> Turn:
    """Reads a turn in either convention, role and content or from and value.

    Raises:
        UserError: a key or a role is unknown, or a value is not of its kind.
    """
    if not isinstance(entry, dict):
        raise UserError(f"{location}, field {place}: expected a turn, an object, found {describe(entry)}")
    given = {key for key, item in entry.items() if item is not None and item != []} - METADATA_KEYS
    given -= {key for key in TEXT_KEYS if entry.get(key) == ""}
    extra = {*TEXT_KEYS, CALLS, "weight"}
    for role_key, content_key in (("role", "content"), ("from", "value")):
        if role_key in given and given <= {role_key, content_key, *extra}:
            break
    else:
        found = ", ".join(entry) or "none"
        raise UserError(
            f"{location}, field {place}: expected the keys role and content, or from and value, found {found}"
        )
    name = read_text(entry[role_key], location, f"{place}.{role_key}")
    if name not in ROLES:
        raise UserError(f"{location}, field {place}.{role_key}: expected one of {', '.join(ROLES)}, found {name!r}")
    role = ROLES[name]
    content = entry.get(content_key)
    if content is None and CALLS in given:
        content = ""
    return Turn(
        role,
        _content(content, location, f"{place}.{content_key}"),
        read_weight(entry.get("weight"), location, f"{place}.weight"),
        _extra(entry, given, role, location, place),
    )


def _extra(entry: dict[str, Any], given: set[str], role: str, location: Location, place: str) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    for key, roles in {**TEXT_KEYS, CALLS: ("assistant",)}.items():
        if key not in given:
            continue
        if role not in roles:
            raise UserError(
                f"{location}, field {place}.{key}: expected in a turn of {' or '.join(roles)}, found in {role}"
            )
        where = f"{place}.{key}"
        extra[key] = _calls(entry[key], location, where) if key == CALLS else read_text(entry[key], location, where)
    return extra


def _calls(value: Any, location: Location, place: str) -> list[dict[str, Any]]:
    """The calls, with arguments as an object: OpenAI's format has them as JSON text, chat templates want the object."""
    if not isinstance(value, list):
        raise UserError(f"{location}, field {place}: expected a list of calls, found {describe(value)}")
    calls = []
    for index, call in enumerate(value):
        where = f"{place}[{index}]"
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(
                f"{location}, field {where}: expected {{function: {{name, arguments}}}}, found {describe(call)}"
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = parse_text(arguments, location, f"{where}.function.arguments")
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, dict):
            raise UserError(
                f"{location}, field {where}.function.arguments: expected an object, found {describe(arguments)}"
            )
        kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        calls.append({**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return calls


def read_tools(value: Any, location: Location) -> tuple[dict[str, Any], ...]:
    """The functions that a conversation may call, a list of objects or the JSON text of one; empty where null.

    Raises:
        UserError: it is no such list.
    """
    if isinstance(value, str):
        value = parse_text(value, location, "tools") if value.strip() else None
    if value is None:
        return ()
    if not isinstance(value, list):
        raise UserError(f"{location}, field tools: expected a list of functions, found {describe(value)}")
    for index, tool in enumerate(value):
        if not isinstance(tool, dict):
            raise UserError(f"{location}, field tools[{index}]: expected an object, found {describe(tool)}")
    return tuple(value)


def read_weight(value: Any, location: Location, place: str) -> float:
    """A weight in the loss; 1 where null.

    Raises:
        UserError: it is no number from 0 to `MAX_WEIGHT`.
    """
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_WEIGHT:
        raise UserError(
            f"{location}, field {place}: expected a number from 0 to {MAX_WEIGHT:,.0f}, found {describe(value)}"
        )
    return float(value)


def _content(value: Any, location: Location, place: str) -> str:
    """A turn's text: a string, or a list of text parts, which are joined."""
    if not isinstance(value, list):
        return read_text(value, location, place)
    texts = []
    for index, part in enumerate(value):
        given = {key: item for key, item in part.items() if item is not None} if isinstance(part, dict) else {}
        if given.keys() != {"type", "text"} or given["type"] != "text":
            kind = f"a part of type {given['type']!r}" if "type" in given else describe(part)
            raise UserError(f"{location}, field {place}[{index}]: expected a part of type 'text', found {kind}")
        texts.append(read_text(given["text"], location, f"{place}[{index}].text"))
    return "".join(texts)


def read_text(value: Any, location: Location, place: str) -> str:
    """A text.

    Raises:
        UserError: it is something else.
    """
    if not isinstance(value, str):
        raise UserError(f"{location}, field {place}: expected a string, found {describe(value)}")
    return value
