"""The train step: what its loss and gradients do not depend on, what it leaves alone, and float16's loss scale."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_builders import llama_tensors, write_folder
from flax import nnx
from oracles import tiny_llama

from models.lora import initial_adapter
from models.parameters import split
from zagora_jax import train_state
from zagora_jax.base import BaseModel, open_base
from zagora_jax.data.batches import Batches
from zagora_jax.data.examples import Example, Examples
from zagora_jax.data.sources import Location
from zagora_jax.option_groups import LoraConfig
from zagora_jax.step import ForwardOptions, make_evaluation_step, make_train_step
from zagora_jax.train_state import LossScale, initial_state

ROWS = 8
ONE, TWO = 7, 9  # words
# The tests compile many small programs, whose speed does not matter.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

# The gradient that reached the optimizer becomes its state, and nothing is updated.
RECORDER = optax.GradientTransformation(
    init=lambda params: jax.tree.map(jnp.zeros_like, params),
    update=lambda gradients, _state, _params: (jax.tree.map(jnp.zeros_like, gradients), gradients),
)
SCHEDULE = optax.linear_schedule(1e-2, 0.0, 10)


@dataclass(frozen=True)
class Subject:
    """A tiny model with a non-zero adapter."""

    base: BaseModel
    graph: nnx.GraphDef
    frozen: nnx.State
    adapters: nnx.State

    def compile(self, *, optimizer=RECORDER, segmented=False, max_grad_norm=0.0, dropout_seed=None):
        options = ForwardOptions(kernel="reference", remat="none", segmented=segmented)
        step = make_train_step(
            self.graph, optimizer, SCHEDULE, options, max_grad_norm=max_grad_norm, dropout_seed=dropout_seed
        )
        return jax.jit(step, compiler_options=QUICK_COMPILE)

    def state(self, optimizer=RECORDER):
        return initial_state(self.adapters, optimizer, self.base.dtype.name)


def make_subject(directory, dtype, dropout=0.0):
    lora = LoraConfig(rank=4, alpha=8, targets=["q_proj", "down_proj"], dropout=dropout)
    base = open_base(str(directory), quantization="nf4", dtype=dtype, lora=lora)
    graph, _, declared = split(base.model)
    # B must not be zero, or A would have no gradient.
    adapters = jax.tree.map(lambda leaf: leaf + 0.02, initial_adapter(declared, seed=3))
    return Subject(base, graph, base.load(), adapters)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def subject(directory):
    return make_subject(directory, "float32")


@pytest.fixture(scope="module")
def step(subject):
    return subject.compile()


def batch_of(accumulation, micro_batch_size, *, packing=False, rows=ROWS):
    """The batch of the one optimizer step that holds all rows, of unequal lengths and supervised parts."""
    rng = np.random.default_rng(0)
    examples = []
    for row in range(rows):
        length = 8 + 3 * row
        supervised = np.arange(length) >= length - 2 - row
        examples.append(Example(rng.integers(0, 320, length, np.int32), supervised, Location("rows", row + 1, "line")))
    batches = Batches(
        Examples.of(examples),
        sequence_length=96,
        packing=packing,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=accumulation,
        shuffle=False,
    )
    assert batches.total_steps(1) == 1
    return batches.at(0)


def gradient_difference(one, other):
    """The distance of two gradients relative to their size."""
    return float(optax.global_norm(jax.tree.map(jnp.subtract, one, other)) / optax.global_norm(other))


def as_bytes(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize(("accumulation", "micro_batch_size"), [(2, 4), (5, 2)])
def test_loss_and_gradients_are_the_same_for_any_split(subject, step, accumulation, micro_batch_size):
    """The second split has a whole micro-batch without rows."""
    whole, expected = step(subject.state(), subject.frozen, batch_of(1, ROWS))
    parts, metrics = step(subject.state(), subject.frozen, batch_of(accumulation, micro_batch_size))
    assert metrics["supervised_tokens"] == expected["supervised_tokens"] == sum(2 + row for row in range(ROWS))
    # Sums in another order: some hundred float32 terms, each rounded by 2^-24 = 6e-8 of its size.
    assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-6)
    assert gradient_difference(parts.optimizer, whole.optimizer) < 1e-6
    assert float(metrics["grad_norm"]) == pytest.approx(float(optax.global_norm(whole.optimizer)), rel=1e-5)


@pytest.fixture(scope="module")
def known_losses(tmp_path_factory):
    """A model whose loss is 2 for a target of TWO and 1 for one of ONE, whatever stands before."""
    tensors = llama_tensors()
    for name in tensors:
        if "o_proj" in name or "down_proj" in name:
            tensors[name][:] = 0  # no layer adds anything, but the adapters' gradients are not zero
    vocabulary, hidden = tensors["model.embed_tokens.weight"].shape
    tensors["model.embed_tokens.weight"][:] = 1
    tensors["model.norm.weight"][:] = 1
    # The last hidden state is all ones, so that a word's logit is the sum over its row of the head.
    probability = np.full(vocabulary, (1 - np.exp(-1) - np.exp(-2)) / (vocabulary - 2))
    probability[[ONE, TWO]] = np.exp(-1), np.exp(-2)
    rows = tensors["lm_head.weight"] = np.random.default_rng(0).standard_normal((vocabulary, hidden), np.float32)
    rows += ((np.log(probability) - rows.sum(1)) / hidden)[:, None].astype(np.float32)
    options = {"tie_word_embeddings": False, "rms_norm_eps": 1e-12}
    folder = write_folder(tmp_path_factory.mktemp("known") / "model", tensors, **options)
    lora = LoraConfig(targets=["o_proj", "down_proj"])
    base = open_base(str(folder), quantization="none", dtype="float32", lora=lora)
    graph, _, declared = split(base.model)
    return Subject(base, graph, base.load(), initial_adapter(declared, seed=0))


def test_the_loss_of_a_step_is_the_mean_over_its_tokens_not_over_its_micro_batches(known_losses):
    """2 targets with a loss of 4.0 in all and 8 with one of 8.0: 12 / 10, where the mean of means would be 1.5."""
    few, many = np.array([5, TWO, TWO], np.int32), np.array([5] + 8 * [ONE], np.int32)
    examples = [Example(tokens, np.arange(len(tokens)) > 0, Location("a", 1)) for tokens in (few, many)]

    def batch(accumulation, rows):
        shape = {"gradient_accumulation_steps": accumulation, "micro_batch_size": rows}
        return Batches(Examples.of(examples), sequence_length=16, packing=False, shuffle=False, **shape).at(0)

    step = known_losses.compile()
    whole, expected = step(known_losses.state(), known_losses.frozen, batch(1, 2))
    parts, metrics = step(known_losses.state(), known_losses.frozen, batch(2, 1))
    # Of each word's logit and of their sum of exponentials, float32 keeps 2^-24 = 6e-8 of sums over 64 and 128 terms.
    assert [float(found["loss"]) for found in (expected, metrics)] == pytest.approx([1.2, 1.2], rel=2e-6)
    assert metrics["supervised_tokens"] == 10
    assert float(optax.global_norm(whole.optimizer)) > 0.01
    assert gradient_difference(parts.optimizer, whole.optimizer) < 1e-6


def test_loss_and_gradients_are_the_same_with_packing(subject, step):
    whole, expected = step(subject.state(), subject.frozen, batch_of(1, ROWS))
    batch = batch_of(1, 2, packing=True)
    assert batch.segment_ids.max() > 1
    packed, metrics = subject.compile(segmented=True)(subject.state(), subject.frozen, batch)
    assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-6)
    assert gradient_difference(packed.optimizer, whole.optimizer) < 1e-6


def test_base_stays_and_counts_go_on(subject, step):
    before = as_bytes(subject.frozen)
    state, metrics = step(subject.state(), subject.frozen, batch_of(1, ROWS))
    assert (int(state.step), int(state.updates)) == (1, 1)
    state, _ = step(state, subject.frozen, batch_of(1, ROWS))
    assert (int(state.step), int(state.updates)) == (2, 2)
    assert as_bytes(subject.frozen) == before
    assert float(metrics["learning_rate"]) == pytest.approx(1e-2)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.adapters)} == {np.dtype("float32")}


def test_a_step_that_is_not_finite_changes_nothing(subject, step):
    state, _ = step(subject.state(), subject.frozen, batch_of(1, ROWS))
    batch = batch_of(1, ROWS)
    broken = batch._replace(weights=np.where(batch.weights > 0, np.inf, 0).astype(np.float32))
    skipped, metrics = step(state, subject.frozen, broken)
    assert not metrics["finite"]
    assert (int(skipped.step), int(skipped.updates)) == (2, 1)
    assert as_bytes((skipped.adapters, skipped.optimizer)) == as_bytes((state.adapters, state.optimizer))
    # The schedule goes by updates.
    _, metrics = step(skipped, subject.frozen, batch)
    assert float(metrics["learning_rate"]) == pytest.approx(float(SCHEDULE(1)))


def test_gradients_are_clipped_to_the_global_norm(subject, step):
    free, metrics = step(subject.state(), subject.frozen, batch_of(1, ROWS))
    norm = float(metrics["grad_norm"])
    clipped, metrics = subject.compile(max_grad_norm=norm / 4)(subject.state(), subject.frozen, batch_of(1, ROWS))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-6)  # as it was before
    expected = jax.tree.map(lambda g: g / 4, free.optimizer)
    assert gradient_difference(clipped.optimizer, expected) < 2e-6  # the divisor is the norm + 1e-6, and the norm > 1
    assert norm > 1


def test_dropout_is_on_in_training_and_off_in_evaluation(directory, subject, step):
    batch = batch_of(1, ROWS)
    dropping = make_subject(directory, "float32", dropout=0.5)
    drop = dropping.compile(dropout_seed=7)
    _, plain = step(subject.state(), subject.frozen, batch)
    state, first = drop(dropping.state(), dropping.frozen, batch)
    _, again = drop(dropping.state(), dropping.frozen, batch)
    _, second = drop(state, dropping.frozen, batch)  # the adapter is the same, since the recorder updates nothing
    assert first["loss"] == again["loss"]
    assert len({float(metrics["loss"]) for metrics in (plain, first, second)}) == 3

    options = ForwardOptions(kernel="reference", remat="none", segmented=False)
    evaluate = jax.jit(make_evaluation_step(dropping.graph, options), compiler_options=QUICK_COMPILE)
    total, count = evaluate(dropping.adapters, dropping.frozen, batch)
    assert float(total / count) == pytest.approx(float(plain["loss"]), rel=1e-6)


@pytest.fixture(scope="module")
def half(directory):
    subject = make_subject(directory, "float16")
    return subject, subject.compile()


def scaled(subject, scale, clean_steps=0):
    return subject.state()._replace(loss_scale=LossScale(jnp.float32(scale), jnp.int32(clean_steps)))


def test_float16_gradients_are_those_of_float32(subject, step, half):
    subject16, step16 = half
    exact, _ = step(subject.state(), subject.frozen, batch_of(1, ROWS))
    state, metrics = step16(scaled(subject16, 2.0**10), subject16.frozen, batch_of(1, ROWS))
    assert metrics["finite"]
    assert metrics["loss_scale"] == 2.0**10
    assert {leaf.dtype for leaf in jax.tree.leaves(state.adapters)} == {np.dtype("float32")}
    # float16 keeps 11 bits: each of the roughly 20 roundings between two layers is off by up to 2^-11 = 5e-4.
    assert gradient_difference(state.optimizer, exact.optimizer) < 20 * 2**-11


def test_float16_halves_its_scale_on_overflow_and_skips_the_step(half):
    subject, step = half
    state = scaled(subject, 2.0**40, clean_steps=5)
    skipped, metrics = step(state, subject.frozen, batch_of(1, ROWS))
    assert not metrics["finite"]
    assert (float(skipped.loss_scale.scale), int(skipped.loss_scale.clean_steps)) == (2.0**39, 0)
    assert (int(skipped.step), int(skipped.updates)) == (1, 0)
    assert as_bytes((skipped.adapters, skipped.optimizer)) == as_bytes((state.adapters, state.optimizer))


def test_float16_doubles_its_scale_after_clean_steps(half):
    subject, step = half
    almost = train_state.GROWTH_INTERVAL - 1
    state, _ = step(scaled(subject, 2.0**8, clean_steps=almost - 1), subject.frozen, batch_of(1, ROWS))
    assert (float(state.loss_scale.scale), int(state.loss_scale.clean_steps)) == (2.0**8, almost)
    state, _ = step(state, subject.frozen, batch_of(1, ROWS))
    assert (float(state.loss_scale.scale), int(state.loss_scale.clean_steps)) == (2.0**9, 0)


def test_float16_scale_never_falls_below_one(half):
    subject, step = half
    batch = batch_of(1, ROWS)
    broken = batch._replace(weights=np.where(batch.weights > 0, np.inf, 0).astype(np.float32))
    state, _ = step(scaled(subject, 1.0), subject.frozen, broken)
    assert float(state.loss_scale.scale) == 1.0


def test_float16_starts_with_a_scale_and_others_have_none(subject, half):
    assert half[0].state().loss_scale.scale == train_state.INITIAL_SCALE
    assert subject.state().loss_scale is None
