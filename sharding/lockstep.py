"""One loop for all equal stages of a pipeline: activations move on to the next stage between its ticks.

For use under shard_map. In tick t, stage s of S runs micro-batch t - s forward. The loss of the last stage's
micro-batch is computed by all stages together, and its gradient goes back at once: in the same tick, stage s runs
micro-batch t - 2 (S - 1) + s backward, from what its forward half kept: what the function of a stage says, or its input
alone, from which it is then computed again.

The first S - 1 ticks have no backward half and the last S - 1 no forward half. So a step takes M + S - 1 halves of
either kind for M micro-batches, as long as with all forward passes first (Huang et al. 2019, "GPipe",
arXiv:1811.06965), and yet a stage keeps something of 2 S - 1 at most, however many micro-batches there are. Where a
stage has nothing to do in a tick, it computes what is thrown away.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sharding.kept import keeping

AXIS = "stage"


@dataclass(frozen=True)
class StageFunctions:
    """What the stages compute; micro-batches are numbers int32 [].

    Attributes:
        enter: (micro-batch) -> x, what the first stage takes. All stages call it together.
        run: (trained parameters, x, micro-batch) -> y, what this stage's layers make of x; of the same shape.
        loss: (y, micro-batch) -> float32 [], from what the last stage makes. All stages call it together, with the
            same y, and have the same result and the same gradient of y.
        held: the arrays that `run` uses for every micro-batch.
        keeps_input: whether the input of `run` is all that is kept of it.
    """

    enter: Callable[[jax.Array], jax.Array]
    run: Callable[[Any, jax.Array, jax.Array], jax.Array]
    loss: Callable[[jax.Array, jax.Array], jax.Array]
    held: Any = ()
    keeps_input: bool = True


def most_kept(stages: int, micro_batches: int) -> int:
    """Return of how many micro-batches a stage keeps something."""
    return min(micro_batches, 2 * stages - 1)


def idle_share(stages: int, micro_batches: int) -> float:
    """Return the share of time in which stages that take equally long compute nothing of use: the bubble."""
    return (stages - 1) / (micro_batches + stages - 1)


def pipeline_gradients(
    functions: StageFunctions, trained: Any, micro_batches: int, scale: jax.Array
) -> tuple[Any, jax.Array]:
    """Return the gradients of this stage's parameters, times `scale`, and the loss, both summed over micro-batches."""
    flow = _Flow(functions, trained, micro_batches)
    ahead, last = flow.stages - 1, flow.stages - 1 + micro_batches

    def warm_up(carry: tuple, tick: jax.Array) -> tuple[tuple, None]:
        x, kept = carry
        y, kept = flow.forward(x, kept, tick)
        return (flow.onward(y, tick), kept), None

    def both(carry: tuple, tick: jax.Array) -> tuple[tuple, None]:
        x, kept, gradient, gradients, total = carry
        y, kept = flow.forward(x, kept, tick)
        x = flow.onward(y, tick)
        loss, pull_back = jax.vjp(lambda y: functions.loss(y, tick - ahead), flow.of_last(y))
        (of_loss,) = pull_back(scale)
        gradient = jnp.where(flow.stage == ahead, of_loss, _shifted(gradient, -1))
        gradient, gradients = flow.backward(gradient, gradients, kept, tick)
        return (x, kept, gradient, gradients, total + loss), None

    x, kept = flow.begin()
    gradients = jax.tree.map(jnp.zeros_like, trained)
    (x, kept), _ = _ticks(warm_up, (x, kept), 0, ahead)
    carry = (x, kept, jnp.zeros_like(x), gradients, jnp.float32(0))
    (_, kept, gradient, gradients, total), _ = _ticks(both, carry, ahead, last)

    def run_out(carry: tuple, tick: jax.Array) -> tuple[tuple, None]:
        gradient, gradients = carry
        return flow.backward(_shifted(gradient, -1), gradients, kept, tick), None

    (_, gradients), _ = _ticks(run_out, (gradient, gradients), last, last + ahead)
    return gradients, total


def pipeline_loss(functions: StageFunctions, trained: Any, micro_batches: int) -> jax.Array:
    """Return the loss summed over the micro-batches."""
    return pipeline_outputs(functions, trained, micro_batches, functions.loss).sum()


def pipeline_outputs(
    functions: StageFunctions, trained: Any, micro_batches: int, end: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """Return `end` of every micro-batch [M, ...]: a function of what the last stage makes, as `StageFunctions.loss`."""
    flow = _Flow(functions, trained, micro_batches)
    ahead = flow.stages - 1

    def warm_up(x: jax.Array, tick: jax.Array) -> tuple[jax.Array, None]:
        return flow.onward(flow.run(x, tick), tick), None

    def with_end(x: jax.Array, tick: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = flow.run(x, tick)
        return flow.onward(y, tick), end(flow.of_last(y), tick - ahead)

    x, _ = _ticks(warm_up, flow.first_input(), 0, ahead)
    return _ticks(with_end, x, ahead, ahead + micro_batches)[1]


class _Flow:
    """One stage's part in the order of the tasks."""

    def __init__(self, functions: StageFunctions, trained: Any, micro_batches: int):
        self._functions, self._trained, self._micro_batches = functions, trained, micro_batches
        self.stages, self.stage = lax.axis_size(AXIS), lax.axis_index(AXIS)
        self._slots = most_kept(self.stages, micro_batches)
        self._held = trained, functions.held

    def first_input(self) -> jax.Array:
        """Return what the stage runs in tick 0; of use in the first stage alone."""
        return self._functions.enter(jnp.int32(0))

    def begin(self) -> tuple[jax.Array, list[jax.Array]]:
        """Return that, and room for what is to be kept."""
        x = self.first_input()
        kept = jax.eval_shape(lambda x: self._run_keeping(x, jnp.int32(0))[1], x)
        return x, [jnp.zeros((self._slots, *leaf.shape), leaf.dtype) for leaf in kept]

    def run(self, x: jax.Array, tick: jax.Array) -> jax.Array:
        """Run the micro-batch that is due forward."""
        return self._functions.run(self._trained, x, self._clipped(tick - self.stage))

    def forward(self, x: jax.Array, kept: list[jax.Array], tick: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Run the micro-batch that is due forward, and keep what its backward half needs."""
        number = tick - self.stage
        own = self._clipped(number)
        slot, is_due = own % self._slots, self._is_due(number)
        y, new = self._run_keeping(x, own)
        return y, [
            _put(stack, jnp.where(is_due, one, _at(stack, slot)), slot) for stack, one in zip(kept, new, strict=True)
        ]

    def _run_keeping(self, x: jax.Array, micro_batch: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        if self._functions.keeps_input:
            return self._functions.run(self._trained, x, micro_batch), [x]
        run = self._of_micro_batch(micro_batch)
        y, kept, self._pull_back = keeping(run, (self._trained, x), self._held)
        return y, kept

    def _of_micro_batch(self, number: jax.Array) -> Callable[[Any, jax.Array], jax.Array]:
        return lambda trained, x: self._functions.run(trained, x, number)

    def onward(self, y: jax.Array, tick: jax.Array) -> jax.Array:
        """Return what the stage runs in the next tick: what the stage before made in this one, or what enters."""
        entering = self._functions.enter(self._clipped(tick + 1))
        return jnp.where(self.stage == 0, entering, _shifted(y, 1))

    def of_last(self, y: jax.Array) -> jax.Array:
        """Give all stages what the last one made."""
        return lax.psum(jnp.where(self.stage == self.stages - 1, y, 0), AXIS)

    def backward(
        self, gradient: jax.Array, gradients: Any, kept: list[jax.Array], tick: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Run the micro-batch that is due backward; returns its input's gradient, and the sums of the parameters'."""
        number = tick - 2 * (self.stages - 1) + self.stage
        own = self._clipped(number)
        of_own = [_at(stack, own % self._slots) for stack in kept]
        if self._functions.keeps_input:
            _, pull_back = jax.vjp(self._of_micro_batch(own), self._trained, *of_own)
            of_trained, gradient = pull_back(gradient)
        else:
            of_trained, gradient = self._pull_back(of_own, self._held, gradient)
        is_due = self._is_due(number)
        return gradient, jax.tree.map(lambda sum_, term: sum_ + jnp.where(is_due, term, 0), gradients, of_trained)

    def _is_due(self, number: jax.Array) -> jax.Array:
        return (number >= 0) & (number < self._micro_batches)

    def _clipped(self, number: jax.Array) -> jax.Array:
        return jnp.clip(number, 0, self._micro_batches - 1)


def _ticks(body: Callable[[Any, jax.Array], Any], carry: Any, first: int, behind: int) -> tuple[Any, Any]:
    """Loop over ticks; without any, no loop is left for the compiler."""
    return lax.scan(body, carry, jnp.arange(first, behind)) if behind > first else (carry, None)


def _shifted(x: jax.Array, by: int) -> jax.Array:
    """Send x to the stage so many further on; the first ones, or last ones, receive zeros."""
    stages = lax.axis_size(AXIS)
    return lax.ppermute(x, AXIS, [(stage, stage + by) for stage in range(stages) if 0 <= stage + by < stages])


def _at(stack: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(stack, index, keepdims=False, allow_negative_indices=False)


def _put(stack: jax.Array, one: jax.Array, index: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(stack, one, index, 0, allow_negative_indices=False)
