"""The whole answer of `configure`: model, machine, choice, time, host; and what of it is JSON."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from zagora_jax.checkpoints.synthetic import PREFIX
from zagora_jax.commands import ConfigureConfig
from zagora_jax.config import TrainConfig
from zagora_jax.data.batches import Batches
from zagora_jax.data.tokenize import Preparation, tokenize_rows
from zagora_jax.errors import UserError
from zagora_jax.planning.candidates import replicas_of
from zagora_jax.planning.evaluate import Evaluated, Evaluator, Say
from zagora_jax.planning.host import HostNeeds
from zagora_jax.planning.machine import Machine, find_machine
from zagora_jax.planning.memory import DeviceMemory
from zagora_jax.planning.model import PlannedModel, find_model
from zagora_jax.planning.search import Bound, Choice, choose

GIB = 2**30


@dataclass(frozen=True)
class Rows:
    """The training rows, counted.

    Attributes:
        rows: that are trained on.
        tokens: of them, in an epoch.
        width: tokens in a sequence of a step.
        sequences: of an epoch.
    """

    rows: int
    tokens: int
    width: int
    sequences: int

    @property
    def filled(self) -> float:
        """The part of the sequences that is not padding."""
        return self.tokens / (self.sequences * self.width)


@dataclass(frozen=True)
class Duration:
    """How long a run takes, and what for."""

    steps: int
    seconds: float
    cost: float | None


@dataclass(frozen=True)
class Plan:
    """What `configure` answers; `asked_length` is the sequence length as it was given, before rows were counted."""

    config: ConfigureConfig
    model: PlannedModel
    machine: Machine
    choice: Choice
    host: HostNeeds
    rows: Rows | None
    duration: Duration | None
    notes: tuple[str, ...]
    asked_length: int

    @property
    def is_trial(self) -> bool:
        """Whether the weights are random."""
        return self.train_config.model.startswith(PREFIX)

    @property
    def fits(self) -> bool:
        """Whether the run can be made as planned, by the cards' memory and the host's."""
        return self.choice.fits and not self.host.shortages

    @property
    def train_config(self) -> TrainConfig:
        """The chosen configuration."""
        return self.choice.chosen.candidate.config

    @property
    def devices(self) -> list[DeviceMemory]:
        """The memory of each device, stage after stage."""
        stages = self.choice.chosen.stages
        return [memory for memory in stages for _ in range(self.machine.count // len(stages))]

    @property
    def tokens_per_second(self) -> float | None:
        """Of what was chosen, see `speed`."""
        return self.speed(self.choice.chosen)

    def speed(self, evaluated: Evaluated) -> float | None:
        """Return a candidate's tokens a second over all devices; without padding where the rows were counted."""
        speed = evaluated.tokens_per_second
        return None if speed is None else speed * (self.rows.filled if self.rows else 1)


def make_plan(config: ConfigureConfig, say: Say) -> Plan:
    """Answer the options.

    Raises:
        UserError: options that name what does not exist, or contradict each other.
    """
    model, machine = find_model(config), find_machine(config)
    asked_length = config.sequence_length
    rows = None if config.data is None else _count_rows(config, model)
    if rows is not None:  # as in training, sequences are no wider than the longest row needs
        config = config.model_copy(update={"sequence_length": rows.width})
    evaluator = Evaluator(model, machine, config.source, say)
    choice = choose(config, evaluator)
    chosen = choice.chosen
    host = evaluator.host(chosen)
    notes = (*model.notes, *machine.notes, *evaluator.notes, *_pinned_notes(host), *_embedding_notes(config, choice))
    return Plan(config, model, machine, choice, host, rows, _duration(config, chosen, rows), notes, asked_length)


def _pinned_notes(host: HostNeeds) -> Iterator[str]:
    if host.pinned and host.memory_there is None:
        yield f"--host-memory was not given: the host is taken to have the {host.memory / GIB:.0f} GiB that this needs"


def _embedding_notes(config: ConfigureConfig, choice: Choice) -> Iterator[str]:
    embeddings = choice.chosen.candidate.config.embeddings
    if choice.fits and config.embeddings is None and embeddings != "none":
        yield f"nothing fits with the embedding and the head as they are: they are held in {embeddings}, less exactly"


def _count_rows(config: ConfigureConfig, model: PlannedModel) -> Rows:
    """Tokenise the rows as training does."""
    assert config.data is not None
    if model.base.checkpoint is None:
        raise UserError(
            f"--data: counting tokens needs the tokenizer that comes with weights; give the folder of {model.name} "
            "with --model"
        )
    examples = tokenize_rows(config.data, model.base.tokenizer(), Preparation(config.sequence_length)).examples
    batches = Batches(examples, sequence_length=config.sequence_length, packing=config.packing, micro_batch_size=1)
    return Rows(len(examples), int(np.sum(examples.lengths)), batches.width, batches.sequences_per_epoch())


def _duration(config: ConfigureConfig, chosen: Evaluated, rows: Rows | None) -> Duration | None:
    if rows is None or chosen.time is None:
        return None
    train = chosen.candidate.config
    sequences = train.micro_batch_size * train.gradient_accumulation_steps * replicas_of(train)
    steps = -(-rows.sequences // sequences) * config.epochs
    seconds = steps * chosen.time.seconds
    return Duration(steps, seconds, None if config.hourly_price is None else config.hourly_price * seconds / 3600)


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON values; sizes are GiB of 2**30 bytes."""
    chosen = plan.choice.chosen
    return {
        "fits": plan.fits,
        "model": plan.model.name,
        "strategy": chosen.candidate.strategy,
        "source": chosen.memory.source,
        "devices": [_device(plan, memory) for memory in plan.devices],
        "host_gib": _gib(plan.host.memory),
        "host": _host_json(plan.host),
        "interconnect": None if plan.machine.link is None else plan.machine.link.name,
        "tokens_per_second": _rounded(plan.tokens_per_second),
        "step": _step_json(chosen),
        "settings": _settings(chosen),
        "alternatives": [_alternative(plan, evaluated) for evaluated in plan.choice.alternatives],
        "longest_sequence": _bound(plan, plan.choice.longest_sequence),
        "largest_micro_batch": _bound(plan, plan.choice.largest_micro_batch),
        "changes": [list(changes) for changes in plan.choice.changes],
        "data": None if plan.rows is None else _data_json(plan),
        "notes": list(plan.notes),
    }


def _device(plan: Plan, memory: DeviceMemory) -> dict[str, Any]:
    budget = plan.machine.budget
    return {
        "name": plan.machine.name,
        "peak_gib": _gib(memory.peak),
        "limit_gib": _gib(budget.limit),
        "parts_gib": {name: _gib(size) for name, size in memory.parts.items()},
        "total_gib": _gib(budget.total),
        "context_gib": _gib(budget.context),
        "margin_gib": _gib(budget.margin),
    }


def _host_json(host: HostNeeds) -> dict[str, Any]:
    sizes = ("loading", "pinned", "saving", "checkpoints", "export", "memory_there", "disk_free")
    return {
        **{f"{name}_gib": None if (size := getattr(host, name)) is None else _gib(size) for name in sizes},
        "shortages": host.shortages,
    }


def _step_json(chosen: Evaluated) -> dict[str, float] | None:
    time = chosen.time
    if time is None:
        return None
    parts = {"products": time.products, "traffic": time.traffic, "waiting": time.waiting}
    return {"seconds": round(time.seconds, 3), **{f"{name}_seconds": round(part, 3) for name, part in parts.items()}}


def _settings(evaluated: Evaluated) -> dict[str, Any]:
    """Return the options of train that tell the candidate from others, and its embeddings and sequence length."""
    config = evaluated.candidate.config
    named = {"embeddings": config.embeddings, "sequence_length": config.sequence_length}
    return {**evaluated.candidate.settings, **named}


def _alternative(plan: Plan, evaluated: Evaluated) -> dict[str, Any]:
    return {
        "strategy": evaluated.candidate.strategy,
        "settings": _settings(evaluated),
        "peak_gib": _gib(evaluated.memory.peak),
        "source": evaluated.memory.source,
        "tokens_per_second": _rounded(plan.speed(evaluated)),
    }


def _bound(plan: Plan, bound: Bound | None) -> dict[str, Any] | None:
    return None if bound is None else {"value": bound.value, **_alternative(plan, bound.by)}


def _data_json(plan: Plan) -> dict[str, Any]:
    assert plan.rows is not None
    rows, duration = plan.rows, plan.duration
    return {
        "rows": rows.rows,
        "tokens": rows.tokens,
        "filled": round(rows.filled, 4),
        "steps": None if duration is None else duration.steps,
        "seconds": None if duration is None else round(duration.seconds),
        "cost": None if duration is None or duration.cost is None else round(duration.cost, 2),
    }


def _gib(size: int) -> float:
    return round(size / GIB, 2)


def _rounded(speed: float | None) -> float | None:
    return None if speed is None else round(speed, 1)
