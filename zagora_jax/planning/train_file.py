"""The configuration that `configure` writes for `train`."""

import math
import os
from pathlib import Path

from zagora_jax.checkpoints.synthetic import PREFIX
from zagora_jax.commands import ConfigureConfig
from zagora_jax.config import TrainConfig
from zagora_jax.config_file import save_config
from zagora_jax.errors import UserError
from zagora_jax.planning.plan import GIB, Plan

FIRST_LINE = "# Written by python -m zagora_jax.configure"
TRIAL_STEPS = 20


def check_train_file(config: ConfigureConfig, path: Path) -> None:
    """Refuse a file that cannot be written, before the plan is made.

    Raises:
        UserError: another file stands there, there is no such folder, or there are no rows to train on.
    """
    if path.is_dir():
        raise UserError(f"--output {path}: is a folder; name a file in it, such as {path / 'zagora.yaml'}")
    if path.exists() and not _is_ours(path):
        raise UserError(f"--output {path}: stands there and was not written by configure; name another, or remove it")
    if not path.parent.is_dir():
        raise UserError(f"--output {path}: the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"--output {path}: the folder {path.parent} cannot be written to")
    if config.model is not None and not config.model.startswith(PREFIX) and config.data is None:
        raise UserError(f"--output {path}: train needs rows to train on: give --data too")


def write_train_file(plan: Plan, path: Path) -> None:
    """Write what `python -m zagora_jax.train PATH` runs as it is, with the plan in a comment.

    Of a size without weights it is a trial on random ones, which measures memory and speed.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        save_config(train_options(plan), path, comment=_comment(plan, path), defaults=False)
    except OSError as error:
        raise UserError(f"--output {path}: could not be written: {error.strerror or error}") from error


def train_options(plan: Plan) -> TrainConfig:
    """Return the chosen configuration with what train needs beside it."""
    chosen = plan.train_config
    update: dict = {"sequence_length": plan.asked_length, "data": plan.config.data}
    if plan.machine.is_gpu:  # else JAX's allocator takes three quarters of the card at most
        update["device_memory_limit"] = math.floor(plan.machine.budget.limit / GIB * 100) / 100
    if plan.is_trial:
        update |= {"max_steps": TRIAL_STEPS, "data": None}
        update["offload"] = chosen.offload.model_copy(update={"weights_from": "auto"})  # random weights are in no file
    return chosen.model_copy(update=update)


def _is_ours(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(FIRST_LINE)) == FIRST_LINE.encode()


def _comment(plan: Plan, path: Path) -> str:
    chosen, machine = plan.choice.chosen, plan.machine
    speed = "" if plan.tokens_per_second is None else f", about {plan.tokens_per_second:,.0f} tokens/s"
    lines = [
        f"{FIRST_LINE}; run it with: python -m zagora_jax.train {path}",
        f"# {plan.model.name} on {machine.count} x {machine.name}: {chosen.memory.peak / GIB:.2f} of "
        f"{machine.budget.limit / GIB:.2f} GiB a device ({chosen.memory.source}){speed}",
    ]
    if plan.is_trial:
        lines.append(
            "# A trial on random weights: put your model's folder, and data: in place of max_steps:, to train."
        )
    return "\n".join(lines) + "\n"
