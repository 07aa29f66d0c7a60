"""Configurations as YAML files: read with the line of every value, written so that they read back equal."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from zagora_jax.errors import UserError
from zagora_jax.option_groups import CommandConfig
from zagora_jax.options import C, Given, Option, build, fields_of, nearest, options_of, written
from zagora_jax.plain_yaml import PlainLoader


class _Loader(PlainLoader):
    """Reads plain scalars as YAML 1.2 does: 1e-4 is a number, `no` and `010` are not a boolean and an octal number."""


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would not read as the text that it is."""


_PLAIN_SCALARS = [
    ("null", r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    ("float", r"[-+]?((\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
]
for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {}
    for _kind, _pattern, _first in _PLAIN_SCALARS:
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), _first)


def load_config(config_class: type[C], path: Path) -> C:
    """Read a configuration file, such as a run directory's config.yaml."""
    return build(config_class, read_file(config_class, path))


def save_config(config: CommandConfig, path: Path, *, comment: str = "", defaults: bool = True) -> None:
    """Write options as YAML that `load_config` reads back equal; the file appears whole or not.

    Args:
        config: the options.
        path: the file.
        comment: lines that begin with #, to stand at its top.
        defaults: whether options that have their default are written too.
    """
    from zagora_jax.checkpoints.atomic import write_bytes  # here, since reading options needs no checkpoint library

    values = config.model_dump(mode="json", exclude_defaults=not defaults)
    text = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    write_bytes(path, (comment + text).encode())


def read_file(config_class: type[CommandConfig], path: Path) -> dict[str, Given]:
    """Read the values that a YAML file gives, by option.

    Raises:
        UserError: the file can't be read, isn't a YAML mapping, or names an option twice or one that does not exist.
    """
    try:
        loader = _Loader(path.read_text("utf-8"))
        root = loader.get_single_node()
        if root is None:
            raise UserError(f"{path}: the file is empty; expected options, such as `model: ...`")
        return dict(_given(config_class, root, loader, path))
    except OSError as error:
        raise UserError(f"{path}: the configuration file can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: expected YAML in UTF-8, found other bytes ({error.reason})") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path}{_line_of(error)}: not valid YAML: {_problem(error)}") from error


def read_scalar(option: Option, text: str) -> Any:
    """Read a text from the command line as a plain YAML scalar would be read, for `option`."""
    if not text:
        return ""
    loader = _Loader("")
    node = yaml.ScalarNode(loader.resolve(yaml.ScalarNode, text, (True, False)), text)
    try:
        return _value(option, node, loader)
    except yaml.YAMLError as error:
        raise UserError(f"{option.flag}: {_problem(error)}, found {text:.40}") from error


def read_list(option: Option, text: str) -> Any:
    """Read a YAML list, or a quoted text, from the command line."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else _value(option, node, loader)
    except yaml.YAMLError as error:
        raise UserError(f"{option.flag}: expected a YAML list or text, found {text}: {_problem(error)}") from error


def _given(
    config_class: type[BaseModel], mapping: yaml.Node, loader: _Loader, path: Path, prefix: str = ""
) -> Iterator[tuple[str, Given]]:
    """Walk a mapping along the fields of `config_class`, so that every value is known by its option and line."""
    if not isinstance(mapping, yaml.MappingNode):
        of = f"{prefix[:-1]}: " if prefix else ""
        fields = ", ".join(fields_of(config_class))
        found = loader.construct_object(mapping, deep=True)
        raise UserError(
            f"{path}:{_line(mapping)}: {of}expected a mapping of options ({fields}), found {written(found)}"
        )
    first_lines: dict[str, int] = {}
    options = options_of(config_class, prefix)
    for key_node, value_node in mapping.value:
        key, line = str(key_node.value), _line(key_node)
        if key in first_lines:
            raise UserError(f"{path}:{line}: {prefix}{key} is given twice, first on line {first_lines[key]}")
        first_lines[key] = line
        field = fields_of(config_class).get(key)
        if field is None:
            raise UserError(f"{path}:{line}: unknown option {prefix}{key}; {_advice(key, options)}")
        if prefix + key in options:
            yield prefix + key, Given(_value(options[prefix + key], value_node, loader), f"{path}:{line}")
        elif isinstance(field.annotation, type):
            yield from _given(field.annotation, value_node, loader, path, f"{prefix}{key}.")


def _value(option: Option, node: yaml.Node, loader: _Loader) -> Any:
    try:
        value = loader.construct_object(node, deep=True)
    except (ValueError, LookupError, AttributeError) as error:  # PyYAML's, of `!!int x` or of thousands of digits
        kind = node.tag.rpartition(":")[2]
        raise yaml.constructor.ConstructorError(None, None, f"expected {kind}", node.start_mark) from error
    if isinstance(node, yaml.ScalarNode):
        return option.interpret(node.value, value)
    if isinstance(node, yaml.SequenceNode):
        return [
            option.interpret(item.value, read) if isinstance(item, yaml.ScalarNode) else read
            for item, read in zip(node.value, value, strict=True)
        ]
    return value


def _advice(key: str, options: Mapping[str, Option]) -> str:
    close = nearest(key, options)
    if close is None:
        return f"the options here are {', '.join(options)}"
    group, _, field = close.name.rpartition(".")
    return f"the nearest is {field}, within {group}:" if group else f"the nearest is {field}"


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _line_of(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}" if mark else ""


def _problem(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return problem + ("; indent with spaces, not with tabs" if r"'\t'" in problem else "")
