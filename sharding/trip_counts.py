"""How often a loop of a compiled program runs, where XLA's note of it was lost: its counter is followed by hand."""

import operator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sharding.hlo import Instruction, Module

MOST_TRIPS = 100_000

_SAME = frozenset(["copy", "bitcast", "convert", "reshape"])
_ARITHMETIC = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}
_DIRECTIONS = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}


def trip_count(module: "Module", computation: str, loop: "Instruction") -> int | None:
    """Return how often the body of the `while` instruction `loop` of `computation` runs; None where it cannot be told.

    XLA notes the count of most loops. Where it has only noted which part of the loop's state counts, as in loops
    that were pipelined and then unrolled, the counter's first value, the condition and the body are evaluated.
    """
    if loop.trip_count is not None:
        return loop.trip_count
    condition, body = loop.attribute("condition"), loop.attribute("body")
    start = module.by_name[computation, loop.operands[0]]
    if condition is None or body is None or loop.counter is None or start.opcode != "tuple":
        return None
    value = _value(module, computation, start.operands[loop.counter], {})
    step = module.root(body)
    if step.opcode != "tuple":
        return None
    for trips in range(MOST_TRIPS):
        if value is None:
            return None
        state = {loop.counter: value}
        goes_on = _value(module, condition, module.root(condition).name, {0: state})
        if goes_on is None:
            return None
        if not goes_on:
            return trips
        value = _value(module, body, step.operands[loop.counter], {0: state})
    return None


def _value(module: "Module", computation: str, name: str, parameters: "dict[int, Known]") -> int | None:
    """Evaluate an integer of a computation whose `parameters` are known, by position; None where it is not known."""
    instruction = module.by_name[computation, name]
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "constant":
        return int(instruction.literal) if instruction.literal.lstrip("-").isdigit() else None
    if opcode == "parameter":
        parameter = parameters.get(int(instruction.literal))
        return parameter if isinstance(parameter, int) else None
    if opcode == "get-tuple-element":
        return _element(module, computation, instruction, parameters)
    given = [_value(module, computation, operand, parameters) for operand in operands]
    if opcode in ("fusion", "call"):
        called = instruction.computations[0]
        known: dict[int, Known] = {i: value for i, value in enumerate(given) if value is not None}
        return _value(module, called, module.root(called).name, known)
    values = [value for value in given if value is not None]
    if len(values) < len(given):
        return None
    if opcode in _SAME:
        return values[0]
    if opcode in _ARITHMETIC:
        return _ARITHMETIC[opcode](*values)
    if opcode == "compare":
        return int(_DIRECTIONS[instruction.attribute("direction") or "EQ"](*values))
    return None


def _element(
    module: "Module", computation: str, instruction: "Instruction", parameters: "dict[int, Known]"
) -> int | None:
    """Evaluate a part of a tuple that the computation was given or has made."""
    whole = module.by_name[computation, instruction.operands[0]]
    index = int(instruction.attribute("index") or 0)
    if whole.opcode == "tuple":
        return _value(module, computation, whole.operands[index], parameters)
    given = parameters.get(int(whole.literal)) if whole.opcode == "parameter" else None
    return given.get(index) if isinstance(given, dict) else None


# A parameter of a computation: an integer, or what is known of a tuple's parts.
Known = int | dict[int, int]
