"""Checks of a merge: its sums against the model's own layers, and how much of the update rounding left."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.embedding import Embedding
from models.linear import Linear
from models.lora import MAGNITUDE
from models.parameters import Adapter, Frozen
from models.placement import LOCAL
from zagora_jax.errors import UserError

_PROBED_COLUMNS = 8
_FLOAT32_ROUNDING = 2.0**-24  # half a unit in the last place, relative


@dataclass(frozen=True)
class Update:
    """The update scale * B A of one weight [out, in]; A [r, in] and B [out, r] are float32.

    With DoRA, each row of the sum is brought to the length that `magnitude` [out] gives.
    """

    a: np.ndarray
    b: np.ndarray
    scale: float
    magnitude: np.ndarray | None = None

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Return the rows [start, stop) of the update, float32 [stop - start, in]."""
        return (self.b[start:stop] @ self.a) * np.float32(self.scale)

    def merged(self, base: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tuned rows of `base`, float32 [rows, in], which begin at row `start`, and what changed."""
        change = self.rows(start, start + len(base))
        tuned = base + change
        if self.magnitude is None:
            return tuned, change
        lengths = np.linalg.norm(tuned, axis=1, keepdims=True)
        wanted = self.magnitude[start : start + len(base), None]
        tuned = tuned * np.divide(wanted, lengths, out=np.zeros_like(lengths), where=lengths > 0)
        return tuned, tuned - base


@dataclass(frozen=True)
class MergeReport:
    """What was written and compared.

    Attributes:
        tensors: How many were written; each was read back and equals what was computed.
        adapted: How many of them carry an update, or were trained in full.
        changed: How many of those differ from the base model's weights in what was written.
        columns: Columns of adapted weights that were compared with the outputs of the model's layers.
        largest_deviation: The largest difference found there before rounding, absolute.
        share_of_bound: The largest difference as a part of what float32 arithmetic allows.
        share_kept: The part of the whole update that survived rounding, as a projection: 1 is all of it.
    """

    tensors: int
    adapted: int
    changed: int
    columns: int
    largest_deviation: float
    share_of_bound: float
    share_kept: float


class ProbedLayer:
    """One of the model's adapted linear layers, as training runs it, asked for single columns of its matrix.

    The layer's output for a unit vector is a column of W + scale * B A. No sum over the input's width takes part in it,
    so that float32 arithmetic leaves almost no room for deviation, and a wrong scale or a swapped factor shows.
    """

    def __init__(self, layer: Linear, update: Update, number: int):
        """Choose the columns, the same ones for every layer of a width; `number` is the layer's in the model."""
        assert layer.adapter is not None
        self._update, self._number = update, number
        self._rank = max(layer.adapter.layer_ranks.ranks)
        self._parts: Any = nnx.split(layer, Frozen, Adapter)
        width = update.a.shape[1]
        self.columns = np.sort(np.random.default_rng(0).choice(width, min(_PROBED_COLUMNS, width), replace=False))

    def outputs(self, weight: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Compute the columns over the rows of `weight` (float32 [rows, in]), which begin at row `start`.

        Returns:
            The columns, float32 [rows, columns], and by how much another float32 computation of them may differ. One
            computation of sum_r B A and its scaling errs by (r + 2) u sum_r |scale B A|, the addition of W by
            u |W + scale B A| (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1); both sides err.
        """
        b, a = self._update.b[start : start + len(weight)], self._update.a
        padding = (0, self._rank - len(a))  # of a stack whose layers have different ranks
        values: dict[str, Any] = {
            "weight": weight,
            "bias": np.zeros(len(weight), np.float32),
            "lora_A": np.pad(a, (padding, (0, 0))),
            "lora_B": np.pad(b, ((0, 0), padding)),
        }
        if self._update.magnitude is not None:
            values[MAGNITUDE] = self._update.magnitude[start : start + len(weight), None]
        units = np.zeros((len(self.columns), weight.shape[1]), np.float32)  # [columns, in]
        units[np.arange(len(self.columns)), self.columns] = 1
        graph, frozen, adapter = self._parts
        outputs = _apply(graph, _filled(frozen, values), _filled(adapter, values), units, self._number)
        parts = abs(self._update.scale) * (np.abs(b) @ np.abs(a[:, self.columns]))  # [rows, columns]
        bound = 2 * (len(a) + 3) * _FLOAT32_ROUNDING * (np.abs(weight[:, self.columns]) + parts)
        if self._update.magnitude is not None:
            # Scaled by factors whose lengths are roots of sums of `in` squares.
            factors = self._update.magnitude[start : start + len(weight), None] / np.linalg.norm(
                weight + self._update.rows(start, start + len(weight)), axis=1, keepdims=True
            ).clip(np.finfo(np.float32).tiny)
            bound = bound * factors + (weight.shape[1] + 8) * _FLOAT32_ROUNDING * np.abs(np.asarray(outputs).T)
        # XLA may take subnormal numbers for zero.
        return np.asarray(outputs).T, bound + np.finfo(np.float32).tiny


class ProbedTable:
    """The embedding or the output head with its adapter, asked for single columns as `ProbedLayer` is."""

    def __init__(self, table: Embedding, update: Update):
        """Choose the columns."""
        assert table.adapter is not None
        self._update = update
        self._parts: Any = nnx.split(table, Frozen, Adapter)
        self._of_head = table.adapter.of_head
        width = update.a.shape[1]
        self.columns = np.sort(np.random.default_rng(0).choice(width, min(_PROBED_COLUMNS, width), replace=False))

    def outputs(self, weight: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray]:
        """Do what `ProbedLayer.outputs` does."""
        b, a = self._update.b[start : start + len(weight)], self._update.a
        graph, frozen, adapter = self._parts
        values = {"weight": weight, "rows": b, "columns": a[None]}
        units = np.zeros((len(self.columns), weight.shape[1]), np.float32)  # [columns, hidden]
        units[np.arange(len(self.columns)), self.columns] = 1
        run = _logits if self._of_head else _embeddings
        found = np.asarray(run(graph, _filled(frozen, values), _filled(adapter, values), units))  # [columns, rows]
        parts = abs(self._update.scale) * (np.abs(b) @ np.abs(a[:, self.columns]))  # [rows, columns]
        bound = 2 * (len(a) + 3) * _FLOAT32_ROUNDING * (np.abs(weight[:, self.columns]) + parts)
        return found.T, bound + np.finfo(np.float32).tiny


class MergeChecks:
    """Gathers the comparisons of one merge."""

    def __init__(self) -> None:
        self.changed: set[str] = set()
        self.columns = 0
        self.largest_deviation = self.share_of_bound = 0.0
        self.update_norm = self.kept_norm = 0.0

    def compare(
        self, name: str, layer: ProbedLayer | ProbedTable, base: np.ndarray, merged: np.ndarray, start: int
    ) -> None:
        """Compare merged rows with what the layer makes of the base model's rows and the adapter."""
        outputs, bound = layer.outputs(base, start)
        deviation = np.abs(merged[:, layer.columns] - outputs)
        share = float((deviation / bound).max())
        if not share <= 1:
            raise RuntimeError(
                f"{name}: the merged weight is not what the model computes with the adapter: it differs by "
                f"{deviation.max():.3g}, where float32 arithmetic allows {bound.max():.3g}"
            )
        self.columns += len(layer.columns) if start == 0 else 0
        self.largest_deviation = max(self.largest_deviation, float(deviation.max()))
        self.share_of_bound = max(self.share_of_bound, share)

    def count(self, name: str, unchanged: np.ndarray, written: np.ndarray, base: np.ndarray, delta: np.ndarray) -> None:
        """Note whether rows changed in what is written, and how much of the update `delta` that holds."""
        if (written != unchanged).any():
            self.changed.add(name)
        self.update_norm += float(np.vdot(delta, delta))
        self.kept_norm += float(np.vdot(written.astype(np.float32, copy=False) - base, delta))

    def report(self, tensors: int, adapted: list[str], replaced: int) -> MergeReport:
        """Sum up; an adapted weight that is left as it was is an error.

        Of the weights that were trained in full, their number is counted in: a norm may stay as it was in rounding.
        """
        unchanged = [name for name in adapted if name not in self.changed]
        if unchanged:
            raise UserError(
                f"{len(unchanged)} of {len(adapted)} adapted weights would be written as the base model has them, "
                f"first {unchanged[0]}: their updates are zero or too small for the dtype that is written. Train "
                "longer, give --dtype float32, or export with --format adapter, which keeps every update"
            )
        return MergeReport(
            tensors=tensors,
            adapted=len(adapted) + replaced,
            changed=len(self.changed),
            columns=self.columns,
            largest_deviation=self.largest_deviation,
            share_of_bound=self.share_of_bound,
            share_kept=self.kept_norm / self.update_norm,
        )


def _filled(state: nnx.State, values: Mapping[str, np.ndarray]) -> nnx.State:
    """Give the declared parameters of one layer their values, by the last part of their path."""
    return nnx.from_flat_state(
        [(path, variable.replace(jnp.asarray(values[str(path[-1])]))) for path, variable in nnx.to_flat_state(state)]
    )


@partial(jax.jit, static_argnums=0)
def _logits(graph: nnx.GraphDef, frozen: nnx.State, adapter: nnx.State, x: jax.Array) -> jax.Array:
    with jax.default_matmul_precision("highest"):
        terms = nnx.merge(graph, frozen, adapter).head_terms(x, LOCAL, None)
        return sum((jnp.einsum("cd,vd->cv", term.hidden, term.table) for term in terms), jnp.float32(0))


@partial(jax.jit, static_argnums=0)
def _embeddings(graph: nnx.GraphDef, frozen: nnx.State, adapter: nnx.State, units: jax.Array) -> jax.Array:
    with jax.default_matmul_precision("highest"):
        table = nnx.merge(graph, frozen, adapter)
        tokens = jnp.arange(table.weight.get_value().shape[0])[None]
        return table.embed(tokens, LOCAL, jnp.float32)[0][:, jnp.argmax(units, axis=1)].T


@partial(jax.jit, static_argnums=0)
def _apply(graph: nnx.GraphDef, frozen: nnx.State, adapter: nnx.State, x: jax.Array, layer: int) -> jax.Array:
    # Without this a GPU would multiply float32 numbers as TF32, with 10 bits.
    with jax.default_matmul_precision("highest"):
        return nnx.merge(graph, frozen, adapter)(x, LOCAL, None, layer)
