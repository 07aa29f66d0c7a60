"""`report.html`: a run on one page that needs no network, no script and no other file."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from zagora_jax.reporting.cards import GIB, USUAL_THROTTLES
from zagora_jax.reporting.charts import Curve, bar_chart, grid_chart, line_chart
from zagora_jax.reporting.dashboard import duration
from zagora_jax.reporting.history import History, finite
from zagora_jax.reporting.run_view import RunView, Snapshot, read_object
from zagora_jax.reporting.terminal import visible

MOST_POINTS = 160  # of a curve

# Titles of curves, the numbers in them with their labels, and the unit.
CURVES: tuple[tuple[str, tuple[tuple[str, str], ...], str], ...] = (
    ("loss", (("loss", "training"), ("eval_loss", "held out")), ""),
    ("learning rate", (("learning_rate", ""),), ""),
    ("tokens a second", (("tokens_per_second", ""),), ""),
    ("gradient norm", (("grad_norm", ""),), ""),
    ("seconds a step", (("seconds", ""),), " s"),
    ("peak memory of the fullest device", (("peak_memory_gib", ""),), " GiB"),
)
SENSORS = (
    ("temperature", "celsius", " °C"),
    ("utilisation", "utilisation", " %"),
    ("power", "watts", " W"),
    ("memory in use", "memory_gib", " GiB"),
    ("PCIe, to the card", "pcie_received_mb_s", " MB/s"),
    ("PCIe, from the card", "pcie_sent_mb_s", " MB/s"),
)

Charts = list[tuple[str, Markup]]


@dataclass
class Samples:
    """What the model said to the same prompts, first and last.

    Attributes:
        before: texts by prompt, and after how many steps.
        after: likewise.
    """

    before: Mapping[str, str] = field(default_factory=dict)
    before_step: int = 0
    after: Mapping[str, str] = field(default_factory=dict)
    after_step: int = 0


def render_report(view: RunView, samples: Samples | None = None, state: str | None = None) -> str:
    """Lay out the page of a run directory, of whatever it holds so far.

    Args:
        view: the directory.
        samples: what the model said.
        state: what the run is doing, where that is known better than by looking.
    """
    now = view.refresh()
    layout = read_object(view.path / "layout.json", view.problems)
    samples = samples or Samples()
    rows = [(prompt, samples.before.get(prompt, ""), text) for prompt, text in samples.after.items()]
    sections = [("Training", _curves(view)), ("Memory and layers", _memory(layout)), ("Cards", _sensors(view.history))]
    return _template().render(
        title=view.path.name or str(view.path),
        written=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        state=state or now.state,
        warnings=_warnings(view, now),
        numbers=_numbers(now, view.report),
        sections=[(heading, charts) for heading, charts in sections if charts],
        samples=rows,
        samples_before=samples.before_step,
        samples_after=samples.after_step,
        tables=_tables(view.report, layout),
        config=_config(view),
    )


@cache
def _template() -> Template:
    loader = PackageLoader("zagora_jax", "reporting")
    page = Environment(autoescape=True, undefined=StrictUndefined, loader=loader, finalize=_shown)
    return page.get_template("report.html.jinja")


def _shown(value: Any) -> Any:
    """Let control characters, which HTML has no place for, be seen."""
    return value if isinstance(value, Markup) else visible(str(value))


def _curves(view: RunView) -> Charts:
    charts = []
    for title, names, unit in CURVES:
        curves = []
        for name, label in names:
            points = view.history[name].buckets(MOST_POINTS)
            if name == "eval_loss":
                points = _with_ends(points, view)
            curves.append(Curve(label, points, dots=name == "eval_loss"))
        if title == "loss" or any(curve.points for curve in curves):
            charts.append((title, Markup(line_chart(curves, title, unit))))
    return charts


def _with_ends(points: list[tuple[float, float, float, float]], view: RunView) -> Any:
    """Add the losses before the first step and after the last, which stand in report.json."""
    before, after = (finite(view.report.get(name)) for name in ("loss_before", "loss_after"))
    start = [] if before is None else [(0.0, before, before, before)]
    return start + points + ([] if after is None else [(float(view.history.step), after, after, after)])


def _memory(layout: Mapping[str, Any]) -> Charts:
    """Draw the bytes of each device by what they are for, and which part of which layer it has."""
    kinds, on_host = (_sizes(layout.get(name)) for name in ("bytes_a_device", "host_bytes_a_device"))
    planned, limits = (_numbers_of(layout.get(f"{name}_bytes_a_device")) for name in ("planned", "limit"))
    for device, whole in planned.items():
        parts = kinds.setdefault(device, {})
        parts["at work (activations, gradients, ...)"] = max(0.0, whole - sum(parts.values()))
    charts = []
    if kinds:
        title = "memory of each device by part" + (", against what it has for arrays" if limits else "")
        charts.append((title, _bars(kinds, title, limits)))
    if any(sum(parts.values()) for parts in on_host.values()):
        title = "in the host's memory for each device"
        charts.append((title, _bars(on_host, title, {})))
    if cells := layer_shares(layout):
        title = "part of each layer's weights that a device holds"
        charts.append((title, Markup(grid_chart(cells, title, "layer"))))
    return charts


def _bars(rows: Mapping[str, Mapping[str, float]], title: str, limits: Mapping[str, float]) -> Markup:
    """Draw bytes in the unit that suits the most of them."""
    most = max(sum(parts.values()) for parts in rows.values())
    size, unit = (GIB, " GiB") if most >= 0.1 * GIB else (2**20, " MiB")
    scaled = [(row, {name: value / size for name, value in parts.items()}) for row, parts in rows.items()]
    return Markup(bar_chart(scaled, title, unit, {row: limit / size for row, limit in limits.items()}))


def layer_shares(layout: Mapping[str, Any]) -> list[tuple[str, list[float]]]:
    """Return each device's part of every layer's frozen weights, from layout.json.

    Devices stand in it in the mesh's order, of which the stage is the outermost axis. What waits in the host's memory
    counts for the device that it comes to.
    """
    devices, mesh = list(_sizes(layout.get("bytes_a_device"))), _object(layout.get("mesh"))
    layers, sizes = layout.get("layers"), {axis: size for axis, size in mesh.items() if isinstance(size, int) and size}
    if not devices or not isinstance(layers, int) or layers < 1:
        return []
    stages = sizes.get("stage", 1)
    found = layout.get("layers_of_stages")
    of_stages = [count for count in found if isinstance(count, int)] if isinstance(found, list) else []
    if len(of_stages) != stages or sum(of_stages) != layers:
        of_stages = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    share = 1.0 / (sizes.get("fsdp", 1) * sizes.get("tensor", 1))
    rows = []
    for number, device in enumerate(devices):
        stage = number * stages // len(devices)
        first = sum(of_stages[:stage])
        held = range(first, first + of_stages[stage])
        rows.append((device, [share if layer in held else 0.0 for layer in range(layers)]))
    return rows


def _sensors(history: History) -> Charts:
    charts = []
    for title, name, unit in SENSORS:
        curves = [Curve(f"card {card}", history[f"cards.{card}.{name}"].buckets(MOST_POINTS)) for card in history.cards]
        if any(curve.points for curve in curves):
            charts.append((title, Markup(line_chart(curves, title, unit))))
    return charts


def _warnings(view: RunView, now: Snapshot) -> list[str]:
    slow = view.history.throttled.items()
    found = [f"Card {c} was slowed down in {n} steps: {why}." for (c, why), n in slow if why not in USUAL_THROTTLES]
    if now.skipped:
        found.append(
            f"{now.skipped} updates were left out: loss or gradients were not finite, or the loss was a spike."
        )
    if view.report.get("synthetic") is True:
        found.append("The weights are synthetic: losses mean nothing.")
    return [*found, *view.problems]


def _numbers(now: Snapshot, report: Mapping[str, Any]) -> list[tuple[str, str]]:
    total = "" if now.total_steps is None else f" of {now.total_steps:,}"
    found = (
        ("steps", f"{now.step:,}{total}"),
        ("training loss", _written(now.loss, ".4f")),
        ("held-out loss before", _written(finite(report.get("loss_before")), ".4f")),
        ("held-out loss, newest", _written(now.eval_loss, ".4f")),
        ("tokens a second", _written(now.tokens_per_second, ",.0f")),
        ("peak memory in GiB", _written(now.peak_memory_gib, ".2f")),
        ("left", duration(now.eta_seconds) if now.eta_seconds else None),
    )
    return [(name, value) for name, value in found if value is not None]


def _written(value: float | None, form: str) -> str | None:
    return None if value is None else f"{value:{form}}"


def _tables(report: Mapping[str, Any], layout: Mapping[str, Any]) -> list[tuple[str, Sequence[tuple[str, str]]]]:
    wire = {name: f"{size / 1e6:,.1f} MB" for name, size in _numbers_of(layout.get("wire_bytes_a_step")).items()}
    found = report.get("cards")
    cards = {
        f"card {card.get('index')}": ", ".join(
            [f"{card.get('name')}"]
            + [f"{size:.2f} GiB" for size in (finite(card.get("memory_gib")),) if size is not None]
            + [f"{watts:.0f} W at most" for watts in (finite(card.get("watts_limit")),) if watts is not None]
        )
        for card in (found if isinstance(found, list) else ())
        if isinstance(card, dict)
    }
    tables = {
        "Facts": _object(report.get("facts")),
        "On the wire, a step and device": wire,
        "Cards of the machine": cards,
        "Versions": _object(report.get("versions")),
    }
    return [(name, [(str(k), str(v)) for k, v in rows.items()]) for name, rows in tables.items() if rows]


def _config(view: RunView) -> str:
    try:
        return (view.path / "config.yaml").read_text("utf-8", errors="replace")
    except OSError as error:
        return f"config.yaml cannot be read: {error.strerror}"


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _numbers_of(value: Any) -> dict[str, float]:
    return {name: number for name, found in _object(value).items() if (number := finite(found)) is not None}


def _sizes(value: Any) -> dict[str, dict[str, float]]:
    return {name: _numbers_of(of) for name, of in _object(value).items() if isinstance(of, dict)}
