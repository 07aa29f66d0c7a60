"""What an option is: one leaf field of a configuration, under the name that YAML and the command line share."""

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from zagora_jax.errors import UserError
from zagora_jax.option_groups import CommandConfig

C = TypeVar("C", bound=CommandConfig)

COMMAND_LINE = "command line"

# What pydantic's kinds of error expected, in our words; the braces take pydantic's own figures.
_EXPECTED = {
    "bool_type": "true or false",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_type": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "string_too_short": "a text that is not empty",
    "string_type": "a text",
    "too_short": "a list that is not empty",
}

_WORDS = {Path: "PATH", str: "TEXT", float: "X", bool: "", int: "N"}


@dataclass(frozen=True)
class Option:
    """One option; `name` has a dot between the group and the field, as in `lora.use_rslora`."""

    name: str
    field: FieldInfo

    @property
    def flag(self) -> str:
        """The name on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def types(self) -> frozenset[type]:
        """The types that a value, or an item of a list of values, can have."""
        return frozenset(_leaf_types(self.field.annotation))

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that are listed; the only ones, where no other type is allowed."""
        return tuple(_literals(self.field.annotation))

    @property
    def values(self) -> str:
        """The form of a value, as the help shows it: `nf4|none`, `N`, `PATH[,PATH]`."""
        types = self.types - {str} if self.choices else self.types
        word = next((word for kind, word in _WORDS.items() if kind in types), "")
        if bool in types:
            return f"[true|false|{word}]" if word else "[true|false]"
        form = f"{word}[,{word}]" if list in types else word
        return "|".join((*self.choices, *([form] if form else [])))

    @property
    def default(self) -> str:
        """The default as it would be written; empty where there is none or the description tells it."""
        default = self.field.default
        if self.field.is_required():
            return "required"
        if default is None or self.field.default_factory:
            return ""
        return json.dumps(default) if isinstance(default, bool) else str(default)

    def interpret(self, text: str, value: Any) -> Any:
        """Choose between a scalar as it is written and as YAML reads it: `model: 2024` names a model, not a number."""
        as_written = type(value) not in self.types | {NoneType} and self.types & {str, Path}
        return text if as_written else value


class Given(NamedTuple):
    """A value for an option, and where it was given: `config.yaml:3` or the command line."""

    value: Any
    where: str


def fields_of(config_class: type[BaseModel]) -> dict[str, FieldInfo]:
    """List the fields of a group by the names that options have: `json` cannot be the name of a pydantic field."""
    return {field.alias or name: field for name, field in config_class.model_fields.items()}


def options_of(config_class: type[BaseModel], prefix: str = "") -> dict[str, Option]:
    """List the options of a configuration by name, groups flattened."""
    found: dict[str, Option] = {}
    for name, field in fields_of(config_class).items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= options_of(field.annotation, f"{prefix}{name}.")
        else:
            found[prefix + name] = Option(prefix + name, field)
    return found


def nearest(name: str, options: Mapping[str, Option]) -> Option | None:
    """Find the option whose name, name within its group, or initials (lr) are most like `name`."""
    initials = {"".join(word[0] for word in key.split("_")): option for key, option in options.items() if "_" in key}
    leaves = {key.rpartition(".")[2]: option for key, option in options.items()}
    spellings = initials | leaves | dict(options)
    close = difflib.get_close_matches(name.replace("-", "_").lower(), spellings, n=1)
    return spellings[close[0]] if close else None


def build(config_class: type[C], given: Mapping[str, Given]) -> C:
    """Make a configuration of the given values and the defaults.

    Raises:
        UserError: a line for each wrong or missing value: where it stands, what was expected, what was found.
    """
    values: dict[str, Any] = {}
    for name, item in given.items():
        group, _, field = name.rpartition(".")
        (values.setdefault(group, {}) if group else values)[field] = item.value
    try:
        return config_class.model_validate(values)
    except ValidationError as error:
        raise UserError("\n".join(_complaints(config_class, error, given))) from None


def in_words(error: ValidationError) -> str:
    """Say what was expected of each wrong field of a group, and what was found."""
    return "; ".join(
        f"{'.'.join(map(str, details['loc']))}: expected {_expectation(details)}, found {written(details['input'])}"
        for details in error.errors(include_url=False)
    )


def written(value: Any) -> str:
    """Write a value for a message, as it could stand in YAML."""
    return json.dumps(value, default=str, ensure_ascii=False)


def _complaints(config_class: type[CommandConfig], error: ValidationError, given: Mapping[str, Given]) -> Iterator[str]:
    options = options_of(config_class)
    by_option: dict[str, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        if details["type"] != "default_factory_not_called":  # an echo of another error
            by_option.setdefault(_option_at(details["loc"], options), []).append(details)
    for name, errors in by_option.items():
        if not name:
            yield from (_expectation(details) for details in errors)
        elif errors[0]["type"] == "missing":
            in_file = "" if config_class.positional else f", or {name}: in the YAML file"
            label = name.upper() if name == config_class.positional else options[name].flag
            yield f"{name} is required: give {label} on the command line{in_file}"
        else:
            where = given[name].where
            label = options[name].flag if where == COMMAND_LINE else name
            expected = " or ".join(dict.fromkeys(_expectation(details) for details in errors))
            named = where if where.endswith(f": {name}") else f"{where}: {label}"
            yield f"{named}: expected {expected}, found {written(errors[0]['input'])}"


def _option_at(location: tuple[int | str, ...], options: Mapping[str, Option]) -> str:
    """Name the option at pydantic's location, which goes on into members of unions and items of lists."""
    names = [".".join(map(str, location[:depth])) for depth in (1, 2)]
    return next((name for name in names if name in options), "")


def _expectation(details: ErrorDetails) -> str:
    if details["type"] in _EXPECTED:
        return _EXPECTED[details["type"]].format(**details.get("ctx", {}))
    return details["msg"].removeprefix("Value error, ").removeprefix("expected ").removeprefix("Input should be ")


def _leaf_types(annotation: Any) -> Iterator[type]:
    if get_origin(annotation) is Literal:
        yield str
    elif isinstance(annotation, type) and not get_args(annotation):
        yield annotation
    else:
        if get_origin(annotation) is list:
            yield list
        for part in get_args(annotation):
            if isinstance(part, type) or get_args(part):
                yield from _leaf_types(part)


def _literals(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for part in get_args(annotation):
            yield from _literals(part)
