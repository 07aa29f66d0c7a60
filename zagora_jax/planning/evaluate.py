"""One candidate's memory and time: estimated from shapes in milliseconds, or read from the compiled step."""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from models.attention import choose_kernel
from sharding.mesh import make_mesh
from sharding.program import memory
from zagora_jax.config import TrainConfig
from zagora_jax.distribution import SpreadStep
from zagora_jax.errors import UserError
from zagora_jax.option_groups import LoraConfig
from zagora_jax.planning.analytic import ERROR, estimate_memory
from zagora_jax.planning.candidates import Candidate
from zagora_jax.planning.compiled import compile_planned
from zagora_jax.planning.host import HostNeeds, host_needs, slots_in_host_memory
from zagora_jax.planning.machine import Machine
from zagora_jax.planning.memory import DeviceMemory, read_by_estimate, read_memory
from zagora_jax.planning.micro_batch import Work
from zagora_jax.planning.model import PlannedModel
from zagora_jax.planning.shapes import Shapes, mesh_shape
from zagora_jax.planning.time_model import StepTime, step_time

Say = Callable[[str], None]


@dataclass(frozen=True)
class Evaluated:
    """A candidate with its memory and, where the cards' figures are known, its time.

    `stages` has the memory of a device of each stage; of a step that is not in stages, of any device.
    """

    candidate: Candidate
    stages: tuple[DeviceMemory, ...]
    time: StepTime | None

    @property
    def memory(self) -> DeviceMemory:
        """That of the fullest device."""
        return max(self.stages, key=lambda memory: memory.peak)

    @property
    def highest_peak(self) -> int:
        """Bytes that it needs at most: an estimate's with its error on top."""
        return math.ceil(self.memory.peak * (1 + self._error))

    @property
    def lowest_peak(self) -> int:
        """Bytes that it needs at least."""
        return math.floor(self.memory.peak / (1 + self._error))

    @property
    def _error(self) -> float:
        return ERROR if self.memory.source == "analytic" else 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Over all devices, padding included."""
        return None if self.time is None else self.time.tokens_per_second


class Evaluator:
    """Evaluates settings for one model on one machine."""

    def __init__(
        self, model: PlannedModel, machine: Machine, source: Literal["auto", "compiled", "analytic"], say: Say
    ):
        """Prepare to plan.

        Args:
            model: shapes.
            machine: the devices.
            source: whether memory is the compiler's.
            say: told what takes long.

        Raises:
            UserError: compiled plans were asked for where there is no compiler.
        """
        self.model, self.machine, self._say = model, machine, say
        self.notes: list[str] = []
        self._shapes = Shapes(model.base)
        self._work = Work.of(self._shapes)
        self._devices = None
        if source == "analytic":
            return
        try:
            self._devices = machine.devices()
        except ModuleNotFoundError as error:
            if source == "compiled":
                raise UserError(f"--source compiled: {error}") from error
            self.notes.append(f"memory is estimated: {error}")

    @property
    def compiles(self) -> bool:
        """Whether there is a compiler for these devices."""
        return self._devices is not None

    @property
    def platform(self) -> str:
        """As `jax.Device.platform` names it."""
        return "cuda" if self.machine.is_gpu else "cpu"

    def estimate(self, candidate: Candidate) -> Evaluated:
        """Evaluate from shapes.

        Layers that host memory has no room for come from the disk. Stages that have no room in one program have a
        program each where that needs less, as in training (`residency.settle_form`).
        """
        if self._is_open_form(candidate.config):
            one = self._estimate(candidate)
            if one.memory.peak <= self.machine.budget.limit:
                return one
            several = self._estimate(candidate.changed(stage_form="programs"))
            return min(one, several, key=lambda evaluated: evaluated.memory.peak)
        in_host_memory = self._estimate(candidate)
        stream = self._shapes.streams(candidate.config)[0]
        if stream is None:
            return in_host_memory
        needs, waiting = self.host(in_host_memory), in_host_memory.memory.waiting
        slots = slots_in_host_memory(candidate.config, needs, waiting, stream.streamed_layers)
        return in_host_memory if slots is None else self._estimate(candidate.changed(offload__weights_from=slots))

    def _is_open_form(self, config: TrainConfig) -> bool:
        return config.stage_form == "auto" and self._shapes.in_one_program(config)

    def _estimate(self, candidate: Candidate) -> Evaluated:
        device = self.machine.memory if self.machine.is_gpu else None
        stages = estimate_memory(candidate.config, self._shapes, self._kernel(candidate.config), device)
        return Evaluated(candidate, stages, self._time(candidate.config))

    def compile(self, candidate: Candidate) -> Evaluated:
        """Evaluate by the compiled step."""
        assert self._devices is not None
        estimate = self.estimate(candidate)
        candidate, config = estimate.candidate, estimate.candidate.config
        self._say(f"compiling {candidate}")
        mesh = make_mesh(mesh_shape(config), self._devices)
        step = compile_planned(self._compilable(config), mesh, self.model.base)
        arguments, estimates = self._shapes.arguments(config), estimate.stages
        if not isinstance(step, SpreadStep) or mesh.shape["stage"] > 1:
            peaks, host = step.planned_memory(), step.planned_host_memory()
            firsts = [devices.flat[0] for devices in mesh.devices]  # "stage" is the first axis
            stages = tuple(
                read_by_estimate(peaks[first], held, estimate, host[first])
                for first, held, estimate in zip(firsts, arguments, estimates, strict=True)
            )
        elif config.streamed_weights != "none":
            plan = memory(step.compiled)
            stages = (read_by_estimate(plan.peak, arguments[0], estimates[0], plan.host_peak),)
        else:
            stages = (read_memory(step.compiled, mesh.shape, arguments[0], self.model.base.model.config),)
        return Evaluated(candidate, stages, self._time(config))

    def host(self, evaluated: Evaluated) -> HostNeeds:
        """Reckon what a candidate needs of the host."""
        return host_needs(
            evaluated.candidate.config,
            self._shapes,
            evaluated.stages,
            host_memory=self.machine.host_memory,
            here=bool(self.machine.present),
        )

    def host_holds(self, evaluated: Evaluated) -> bool:
        """Whether the host has the memory for it, as far as anybody knows."""
        there = self.machine.host_memory
        return there is None or self.host(evaluated).memory <= there

    def surely_fits(self, evaluated: Evaluated) -> bool:
        """Whether the cards and the host hold it, with an estimate's error on top."""
        return evaluated.highest_peak <= self.machine.budget.limit and self.host_holds(evaluated)

    def for_machine(self, machine: Machine, lora: LoraConfig) -> "Evaluator":
        """Return one that estimates for another machine, or for another adapter."""
        model = self.model if lora == self.model.lora else self.model.with_lora(lora)
        other = Evaluator(model, machine, "analytic", self._say)
        if model is self.model:
            other._shapes, other._work = self._shapes, self._work
        return other

    def _kernel(self, config: TrainConfig) -> str:
        return choose_kernel(
            config.attention,
            platform=self.platform,
            packing=config.packing,
            dtype=config.compute_dtype,
            head_dim=self.model.base.model.config.head_dim,
            softcap=self.model.base.model.config.attention_softcap,
        )

    def _compilable(self, config: TrainConfig) -> TrainConfig:
        """Replace cuDNN's kernel where it is not installed: the other one needs nearly the same memory."""
        if self._kernel(config) != "cudnn" or _has_cudnn():
            return config
        note = "compiled with attention chunked, since cuDNN is not installed here; the cards will use cudnn"
        if note not in self.notes:
            self.notes.append(note)
        return config.model_copy(update={"attention": "chunked"})

    def _time(self, config: TrainConfig) -> StepTime | None:
        if self.machine.gpu is None or self.machine.link is None:
            return None
        layers = self._shapes.layers(config)
        one_program = self._shapes.in_one_program(config)
        kernel, gpu, link = self._kernel(config), self.machine.gpu, self.machine.link
        return step_time(config, self._work, gpu, link, kernel, layers, one_program=one_program)


def _has_cudnn() -> bool:
    return importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.cudnn") is not None
