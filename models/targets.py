"""Which linear modules get an adapter, by the rules of PEFT's `target_modules`."""

import difflib
from collections.abc import Mapping, Sequence
from typing import TypeVar

import regex  # as re, but with an end to expressions that would take for ever

Value = TypeVar("Value")

ALL_LINEAR = "all-linear"
TABLES = ("lm_head", "embed_tokens")
MATCHING = 1.0  # seconds that an expression may take for a name; usual ones take microseconds


def lora_targets(targets: str | Sequence[str], module_names: Sequence[str]) -> list[str]:
    """Choose the modules that get an adapter.

    The rules are those of `peft.tuners.tuners_utils.check_target_module_exists`: a list holds module names, whole or
    as they end after a dot; a string is a regular expression that matches whole names; `all-linear` means every
    module but `lm_head` and `embed_tokens`. Unlike PEFT, each item of a list has to match something.

    Args:
        targets: A list, a regular expression, or `all-linear`.
        module_names: The model's linear modules, such as `model.layers.0.self_attn.q_proj`.

    Returns:
        The chosen names, in the order of `module_names`.

    Raises:
        ValueError: Nothing matches, or the expression is invalid.
    """
    if isinstance(targets, str):
        chosen = _chosen_by_expression(targets, module_names)
    else:
        for target in targets:
            if not any(_ends_with(name, target) for name in module_names):
                raise ValueError(f"LoRA target {target!r} names no linear module; {_advice(target, module_names)}")
        chosen = [name for name in module_names if any(_ends_with(name, target) for target in targets)]
    if not chosen:
        raise ValueError(f"LoRA targets {targets!r} match no linear module; {_advice('', module_names)}")
    return chosen


def value_of_module(patterns: Mapping[str, Value], module: str, default: Value) -> Value:
    """Return what the first pattern that fits a module says, by the rules of PEFT's `rank_pattern`.

    A pattern is a regular expression for the end of the module's name after a dot, or for the whole name.

    Raises:
        ValueError: A pattern is no regular expression, or takes too long.
    """
    for pattern, value in patterns.items():
        if _is_matched(rf"(.*\.)?({pattern})", module, pattern):
            return value
    return default


def _chosen_by_expression(expression: str, module_names: Sequence[str]) -> list[str]:
    if expression.lower() == ALL_LINEAR:
        return [name for name in module_names if not any(_ends_with(name, table) for table in TABLES)]
    chosen = [name for name in module_names if _is_matched(expression, name, expression)]
    if not chosen and any(_ends_with(name, expression) for name in module_names):
        raise ValueError(
            f"LoRA target {expression!r} is a string, so a regular expression for the whole name, such as "
            f"{module_names[0]!r}; to match names by their end, give a list: [{expression}]"
        )
    if not chosen:
        raise ValueError(
            f"LoRA target {expression!r} matches no whole name of a linear module; {_advice(expression, module_names)}"
        )
    return chosen


def _is_matched(pattern: str, name: str, given: str) -> bool:
    """Whether a regular expression, which was `given` so, matches a whole name."""
    try:
        return regex.fullmatch(pattern, name, timeout=MATCHING) is not None
    except regex.error as error:
        raise ValueError(f"LoRA target {given!r} is not a regular expression: {error}") from None
    except TimeoutError:
        raise ValueError(
            f"LoRA target {given!r} takes more than {MATCHING:g} s to match {name!r}; write a simpler expression"
        ) from None


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _advice(target: str, module_names: Sequence[str]) -> str:
    endings = list(dict.fromkeys(name.rpartition(".")[2] for name in module_names))
    close = difflib.get_close_matches(target.rpartition(".")[2], endings, n=1)
    nearest = f"the nearest is {close[0]}; " if close else ""
    example = f" (in full: {module_names[0]}, ...)" if module_names else ""
    return f"{nearest}the model has {', '.join(endings) or 'none'}{example}"
