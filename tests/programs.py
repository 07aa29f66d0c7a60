"""Reading of traced and compiled programs: which operations they hold, and how large their arrays are."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax


def operations(function: Callable, *arguments: Any) -> Iterator[Any]:
    """Every equation of the traced function, those of loops and calls in it included."""

    def walk(jaxpr: Any) -> Iterator[Any]:
        for equation in jaxpr.eqns:
            yield equation
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(inner, "eqns"):
                    yield from walk(getattr(inner, "jaxpr", inner))

    return walk(jax.make_jaxpr(function)(*arguments).jaxpr)


def count(primitive: str, function: Callable, *arguments: Any) -> int:
    """How often the traced function applies a primitive, e.g. "dot_general"."""
    return sum(equation.primitive.name == primitive for equation in operations(function, *arguments))


def largest_traced(function: Callable, *arguments: Any) -> int:
    """The most elements of any array in the traced function."""
    sizes = [math.prod(out.aval.shape) for equation in operations(function, *arguments) for out in equation.outvars]
    return max(sizes)


def largest_compiled(function: Callable, *arguments: Any) -> int:
    """The most elements of any array in the compiled function's text."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    shapes = re.findall(r"\b(?:pred|bf16|[fsu]\d+)\[([\d,]*)\]", text)
    assert shapes, "no array found in the compiled program's text"
    return max(math.prod(map(int, shape.split(","))) if shape else 1 for shape in shapes)
