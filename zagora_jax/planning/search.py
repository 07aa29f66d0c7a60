"""The choice: the fastest settings that fit, the next ones, the bounds, and what would have to change if none fits.

Estimates order the candidates; the compiler, where there is one, has the last word about the few that matter.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any

from sharding.targets import GPUS
from zagora_jax.arrange import check_ends, ends_trained
from zagora_jax.commands import ConfigureConfig
from zagora_jax.errors import UserError
from zagora_jax.planning.candidates import EMBEDDINGS, Candidate, candidates, replicas_of
from zagora_jax.planning.evaluate import Evaluated, Evaluator
from zagora_jax.planning.machine import Machine
from zagora_jax.planning.strategies import Settings
from zagora_jax.reporting.sensors import GIB

SPEED_STEP = 0.01  # speeds nearer than this count as equal: then the simpler settings go first
DISK_TRUST = 0.9  # of the speed that is foretold with layers from the disk
MOST_COMPILED = 6
ALTERNATIVES = 5
SEQUENCE_MULTIPLE = 128
LARGEST_SEQUENCE = 2**20
MOST_CARDS, LOWEST_RANK = 16, 4  # that are proposed where nothing fits
HOST_SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # GiB, the same


@dataclass(frozen=True)
class Bound:
    """The most of something that fits, and the settings with which it does; None where nothing fits."""

    value: int
    by: Evaluated


@dataclass(frozen=True)
class Choice:
    """What came of the search.

    Attributes:
        chosen: the fastest candidate that fits; where none does, the one that needs least.
        fits: whether it does.
        alternatives: others that fit, from fast to slow, each unlike the rest in strategy or in what is kept.
        longest_sequence: tokens in a row at most, with one row a micro-batch.
        largest_micro_batch: rows at most, with the chosen settings.
        changes: where nothing fits, the shortest lists of changes that would, each by itself sufficient.
    """

    chosen: Evaluated
    fits: bool
    alternatives: tuple[Evaluated, ...] = ()
    longest_sequence: Bound | None = None
    largest_micro_batch: Bound | None = None
    changes: tuple[tuple[str, ...], ...] = ()


def choose(config: ConfigureConfig, evaluator: Evaluator) -> Choice:
    """Search the settings that the options leave open.

    Raises:
        UserError: an option that leaves nothing to search.
    """
    for embeddings in EMBEDDINGS if config.embeddings is None else (config.embeddings,):
        held = config.model_copy(update={"embeddings": embeddings})
        ranked = _ranked(_estimates(held, evaluator), evaluator)
        found = [evaluated for evaluated in ranked if evaluator.host_holds(evaluated)]
        chosen = _fastest_that_fits(found, evaluator)
        if chosen is not None:
            return Choice(
                chosen,
                fits=True,
                alternatives=tuple(_alternatives(found, chosen, evaluator)),
                longest_sequence=_longest_sequence(found, chosen, evaluator),
                largest_micro_batch=_largest_micro_batch(chosen, evaluator),
            )
    least = min(found or ranked, key=lambda e: e.memory.peak)
    if evaluator.compiles:
        least = evaluator.compile(least.candidate)
    return Choice(least, fits=False, changes=tuple(_changes(config, evaluator)))


def _estimates(config: ConfigureConfig, evaluator: Evaluator) -> list[Evaluated]:
    return list(map(evaluator.estimate, _candidates(config, evaluator)))


def _candidates(config: ConfigureConfig, evaluator: Evaluator) -> Iterator[Candidate]:
    """Go through the settings that train takes, or raise why it takes none of them."""
    model, refusal, found = evaluator.model, None, False
    ends = ends_trained(model.base.model)
    for candidate in candidates(config, evaluator.machine.count, model.train_name, model.base.model.config):
        try:
            check_ends(candidate.config, ends)
        except UserError as error:
            refusal = error
            continue
        found = True
        yield candidate
    if refusal is not None and not found:
        raise refusal


def _ranked(found: Sequence[Evaluated], evaluator: Evaluator) -> list[Evaluated]:
    """Order from fast to slow.

    Layers from the disk have to promise a tenth more, since nobody knows what else the disk does. Of equal speed,
    32-bit moments go before 8-bit ones, moments on the device before those on the host, then the most rows a step, the
    fewest streamed layers, and what needs least. What waits in host memory (layers, activations, moments) goes last
    for a host of which nobody said how much it holds.
    """

    def key(evaluated: Evaluated) -> tuple:
        speed, config = evaluated.tokens_per_second, evaluated.candidate.config
        from_disk = config.offload.weights_from not in ("auto", "host")
        step = 0 if speed is None else round(math.log(speed * (DISK_TRUST if from_disk else 1)) / SPEED_STEP)
        rows = config.micro_batch_size * config.gradient_accumulation_steps * replicas_of(config)
        waiting = sum(memory.waiting for memory in evaluated.stages)
        unknown = any(memory.host for memory in evaluated.stages) and evaluator.machine.host_memory is None
        moments = (config.optimizer != "adamw", config.offload.optimizer)
        return (unknown, -step, *moments, -rows, waiting, evaluated.memory.peak)

    return sorted(found, key=key)


def _fastest_that_fits(found: Sequence[Evaluated], evaluator: Evaluator) -> Evaluated | None:
    compiled, limit = 0, evaluator.machine.budget.limit
    for evaluated in found:
        if not evaluator.compiles or compiled >= MOST_COMPILED:
            if evaluated.highest_peak <= limit:
                return evaluated if not evaluator.compiles else evaluator.compile(evaluated.candidate)
        elif evaluated.lowest_peak <= limit:
            exact = evaluator.compile(evaluated.candidate)
            compiled += 1
            if evaluator.surely_fits(exact):
                return exact
    return None


def _alternatives(found: Sequence[Evaluated], chosen: Evaluated, evaluator: Evaluator) -> Iterator[Evaluated]:
    """Yield the next ones, each the fastest of its kind."""
    seen = {chosen.candidate.kind}
    for evaluated in found:
        if evaluated.candidate.kind not in seen and evaluator.surely_fits(evaluated):
            seen.add(evaluated.candidate.kind)
            yield evaluated
        if len(seen) > ALTERNATIVES:
            return


def _longest_sequence(found: Sequence[Evaluated], chosen: Evaluated, evaluator: Evaluator) -> Bound:
    """Search over all kinds of settings: the longest is that of one which keeps little.

    What was chosen fits by its program, where an estimate alone could leave that open.
    """
    best = Bound(chosen.candidate.config.sequence_length, chosen)
    for smallest in _smallest(found):

        def at(length: int, smallest: Candidate = smallest) -> Candidate:
            return smallest.changed(sequence_length=length * SEQUENCE_MULTIPLE)

        bound = _largest(at, evaluator, LARGEST_SEQUENCE // SEQUENCE_MULTIPLE)
        if bound is not None and bound.value * SEQUENCE_MULTIPLE > best.value:
            best = Bound(bound.value * SEQUENCE_MULTIPLE, bound.by)
    return best


def _smallest(found: Sequence[Evaluated]) -> Iterator[Candidate]:
    """Yield of each kind of settings what keeps least; moments on the device and on the host, where room may lack."""
    moments = {(e.candidate.config.optimizer, e.candidate.config.offload.optimizer) for e in found}
    smaller = [pair for pair in sorted(moments) if pair[0] == max(name for name, _ in moments)]  # adamw_8bit, if any
    for candidate in {e.candidate.kind: e.candidate for e in found}.values():
        least: dict[str, Any] = {"micro_batch_size": 1}
        if candidate.config.streamed_weights != "none":
            weights = [e.candidate.config.offload.weights for e in found if e.candidate.kind == candidate.kind]
            least |= {"gradient_accumulation_steps": 1, "offload__weights": max(weights, key=lambda n: (n == "all", n))}
        for optimizer, on_host in smaller:
            yield candidate.changed(**least, optimizer=optimizer, **({"offload__optimizer": True} if on_host else {}))


def _largest_micro_batch(chosen: Evaluated, evaluator: Evaluator) -> Bound:
    known = Bound(chosen.candidate.config.micro_batch_size, chosen)
    found = _largest(lambda rows: chosen.candidate.changed(micro_batch_size=rows), evaluator, 1024)
    return known if found is None or found.value < known.value else found


def _largest(at: Callable[[int], Candidate], evaluator: Evaluator, most: int) -> Bound | None:
    """Return the largest number from 1 to `most` whose candidate fits for certain, by bisection."""

    def fits(number: int) -> bool:
        return evaluator.surely_fits(evaluator.estimate(at(number)))

    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Bound(low, evaluator.estimate(at(low))) if low else None


@dataclass(frozen=True)
class Change:
    """One thing that a person could do, as it is written, and what it makes of the options and the machine."""

    text: str
    options: Settings = field(default_factory=dict)
    machine: Callable[[Machine], Machine] = lambda machine: machine


def _changes(config: ConfigureConfig, evaluator: Evaluator) -> Iterator[tuple[str, ...]]:
    """Yield the changes of which each suffices; where none does, the first pair that does."""
    machine = evaluator.machine
    kinds = [
        *([change] for change in _unpinned(config)),
        *map(list, (_shorter(config), _lower_rank(config), _more(machine), _larger(machine), _more_host(machine))),
    ]
    kinds = [kind for kind in kinds if kind]
    single = [_mildest(kind, partial(_would_fit, config, evaluator)) for kind in kinds]
    if any(single):
        yield from ((change.text,) for change in single if change is not None)
        return
    for first, second in combinations(kinds, 2):
        one = _mildest(first, partial(_would_fit, config, evaluator, second[-1]))
        if one is not None:
            other = _mildest(second, partial(_would_fit, config, evaluator, one))
            assert other is not None  # the last of them has been tried
            yield one.text, other.text
            return


def _mildest(kind: Sequence[Change], suffices: Callable[[Change], bool]) -> Change | None:
    """Return the first of ever stronger changes that suffices, by bisection."""
    if not suffices(kind[-1]):
        return None
    low, high = -1, len(kind) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(kind[middle]) else (middle, high)
    return kind[high]


def _would_fit(config: ConfigureConfig, evaluator: Evaluator, *changes: Change) -> bool:
    options: dict[str, Any] = {}
    machine = evaluator.machine
    for change in changes:
        options |= change.options
        machine = change.machine(machine)
    changed = config.model_copy(update=options)
    other = evaluator.for_machine(machine, changed.lora)
    return any(other.surely_fits(other.estimate(candidate)) for candidate in _least(changed, other))


def _least(config: ConfigureConfig, evaluator: Evaluator) -> Iterator[Candidate]:
    """Go through the candidates that need least: if these do not fit, none does."""
    least = {
        "micro_batch_size": config.micro_batch_size or 1,
        "optimizer": config.optimizer or "adamw_8bit",
        "embeddings": config.embeddings or EMBEDDINGS[-1],
    }
    found = _candidates(config.model_copy(update=least), evaluator)
    for candidate in found:
        streams = candidate.config.streamed_weights != "none"
        if not streams or config.rows_per_step is not None or candidate.config.gradient_accumulation_steps == 1:
            yield candidate


def _shorter(config: ConfigureConfig) -> Iterator[Change]:
    length = config.sequence_length
    while (length := length * 3 // 4 // SEQUENCE_MULTIPLE * SEQUENCE_MULTIPLE) >= SEQUENCE_MULTIPLE:
        yield Change(f"--sequence-length {length}", {"sequence_length": length})


def _lower_rank(config: ConfigureConfig) -> Iterator[Change]:
    rank = config.lora.rank
    while (rank := rank // 2) >= LOWEST_RANK:
        yield Change(f"--lora.rank {rank}", {"lora": config.lora.model_copy(update={"rank": rank})})


def _unpinned(config: ConfigureConfig) -> Iterator[Change]:
    """Yield what the options hold fast and could let go."""
    for name in ("micro_batch_size", "rows_per_step", "optimizer", "remat", "strategy", "embeddings"):
        if getattr(config, name) is not None:
            yield Change(f"without --{name.replace('_', '-')} {getattr(config, name)}", {name: None})
    for name, free in {"activations": None, "weights": "auto", "optimizer": None}.items():
        if (given := getattr(config.offload, name)) != free:
            text = f"without --offload.{name} {str(given).lower()}"
            yield Change(text, {"offload": config.offload.model_copy(update={name: free})})


def _more(machine: Machine) -> Iterator[Change]:
    if machine.gpu is not None:
        for count in range(machine.count + 1, MOST_CARDS + 1):
            yield Change(f"--gpu-count {count}", machine=partial(Machine.with_count, count=count))


def _larger(machine: Machine) -> Iterator[Change]:
    if machine.gpu is not None:
        larger = [gpu for gpu in GPUS.values() if gpu.memory_bytes > machine.memory]
        for gpu in sorted(larger, key=lambda gpu: gpu.memory_bytes):
            yield Change(f"--gpu {gpu.kind}", machine=partial(Machine.with_gpu, gpu=gpu))


def _more_host(machine: Machine) -> Iterator[Change]:
    """Yield larger memories of a host that is not this one, where it was said how large it is."""
    if not machine.present and machine.host_memory is not None:
        for size in HOST_SIZES:
            if size * GIB > machine.host_memory:
                yield Change(f"--host-memory {size}", machine=partial(Machine.with_host_memory, size=size * GIB))
