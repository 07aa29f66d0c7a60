"""The plan as a picture: a stacked bar of memory for each card, against what it has."""

import importlib.util
import os
from pathlib import Path

from zagora_jax.errors import UserError
from zagora_jax.planning.plan import GIB, Plan
from zagora_jax.planning.show import NAMES, parts_of

FORMATS = (".png", ".svg", ".pdf")
COLOURS = {
    "weights": "#4477aa",
    "lora": "#66ccee",
    "optimizer": "#aa3377",
    "error_feedback": "#cc6699",
    "activations": "#228833",
    "gathered": "#ccbb44",
    "workspace": "#99ddff",
    "context": "#777777",
    "margin": "#dddddd",
}


def check_plot(path: Path) -> None:
    """Refuse a picture that cannot be drawn, before the plan is made.

    Raises:
        UserError: matplotlib is missing, or the ending or folder is none to write to.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"--plot {path}: needs matplotlib: install it with `pip install 'zagora-jax[plot]'`")
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"--plot {path}: expected a name that ends with {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise UserError(f"--plot {path}: the folder {path.parent} does not exist")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"--plot {path}: is a folder, or stands in one that cannot be written to")


def draw(plan: Plan, path: Path) -> None:
    """Draw the plan into a file.

    Raises:
        UserError: it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from zagora_jax.checkpoints.atomic import atomic_file

    count, budget = plan.machine.count, plan.machine.budget
    figure = Figure(figsize=(9, 1.6 + 0.4 * count), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    fullest = parts_of(plan, plan.choice.chosen.memory)
    devices = [parts_of(plan, memory) for memory in plan.devices]
    left = [0.0] * count
    for name, most in fullest.items():
        sizes = [parts.get(name, 0) / GIB for parts in devices]
        label = f"{NAMES.get(name, name)} {most / GIB:.2f}"
        axes.barh(range(count), sizes, left=left, color=COLOURS[name], label=label)
        left = [edge + size for edge, size in zip(left, sizes, strict=True)]
    axes.axvline(budget.total / GIB, color="black", linestyle="--", label=f"the device has {budget.total / GIB:.2f}")
    axes.set_yticks(range(count), [f"{plan.machine.name} {number}" for number in range(count)])
    axes.invert_yaxis()
    axes.set_xlabel(f"GiB ({plan.choice.chosen.memory.source})")
    speed = "" if plan.tokens_per_second is None else f", about {plan.tokens_per_second:,.0f} tokens/s"
    axes.set_title(f"{plan.model.name}: {plan.choice.chosen.candidate}{speed}", fontsize=9)
    axes.legend(ncols=4, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.35 / (0.6 + 0.25 * count)))
    try:
        with atomic_file(path) as file:
            figure.savefig(file, format=path.suffix[1:].lower(), dpi=150, bbox_inches="tight")
    except OSError as error:
        raise UserError(f"--plot {path}: could not be written: {error.strerror or error}") from error
