"""The plan as a person reads it: a verdict, a bar of memory for each card, settings, alternatives."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zagora_jax.planning.analytic import ERROR
from zagora_jax.planning.evaluate import Evaluated
from zagora_jax.planning.memory import DeviceMemory
from zagora_jax.planning.plan import GIB, Plan

BAR = 60  # characters
LEAST_SHOWN = GIB // 200  # less would be printed as 0.00
COLOURS = {
    "weights": "blue",
    "lora": "cyan",
    "optimizer": "magenta",
    "error_feedback": "bright_magenta",
    "activations": "green",
    "gathered": "yellow",
    "workspace": "bright_blue",
    "context": "bright_black",
    "margin": "bright_black",
}
NAMES = {
    "lora": "LoRA",
    "error_feedback": "error feedback",
    "gathered": "gathered layers",
    "context": "CUDA context",
}


def show(plan: Plan, console: Console) -> None:
    """Print the plan."""
    console.print(_verdict(plan), soft_wrap=True)
    console.print(_bars(plan))
    console.print(_facts(plan))
    if plan.choice.alternatives:
        console.print(_alternatives(plan))
    for changes in plan.choice.changes:
        console.print(Text(f"would fit: {', '.join(changes)}"))
    for shortage in plan.host.shortages:
        console.print(Text(f"too little: {shortage}", style="bold red"))
    for note in plan.notes:
        console.print(Text(f"note: {note}", style="dim"))


def _verdict(plan: Plan) -> Text:
    chosen, machine = plan.choice.chosen, plan.machine
    verdict = Text("fits" if plan.fits else "does not fit", style="bold green" if plan.fits else "bold red")
    verdict.append(f": {plan.model.name} on {machine.count} x {machine.name}", style="bold")
    if plan.tokens_per_second is not None:
        verdict.append(f", about {plan.tokens_per_second:,.0f} tokens/s")
    peak, limit = chosen.memory.peak / GIB, machine.budget.limit / GIB
    verdict.append(f"; {peak:.2f} of {limit:.2f} GiB a device ({chosen.memory.source}")
    verdict.append(f", to {ERROR:.0%})" if chosen.memory.source == "analytic" else ")")
    return verdict


def parts_of(plan: Plan, memory: DeviceMemory) -> dict[str, int]:
    """What takes room on a device, in the order of the bar: arrays, context, margin."""
    budget = plan.machine.budget
    parts = {**memory.parts, "context": budget.context, "margin": budget.margin}
    return {name: size for name, size in parts.items() if size}


def _bars(plan: Plan) -> Table:
    total = plan.machine.budget.total
    widest = max(total, *(sum(parts_of(plan, memory).values()) for memory in plan.devices))
    table = Table.grid(padding=(0, 1))
    for number, memory in enumerate(plan.devices):
        name = "card" if plan.machine.is_gpu else "device"
        table.add_row(f"{name} {number}", _bar(parts_of(plan, memory), total, widest), f"{total / GIB:.2f} GiB")
    legend = Text()
    for name, size in parts_of(plan, plan.choice.chosen.memory).items():
        if size < LEAST_SHOWN:
            continue
        legend.append("■ ", style=COLOURS[name])
        legend.append(f"{NAMES.get(name, name)} {size / GIB:.2f}  ")
    table.add_row("", legend)
    return table


def _bar(parts: dict[str, int], total: int, widest: int) -> Text:
    bar = Text()
    edge = drawn = 0
    for name, size in parts.items():
        edge += size
        end = round(edge / widest * BAR)
        bar.append(("░" if name == "margin" else "█") * (end - drawn), style=COLOURS[name])
        drawn = end
    bar.append("·" * (BAR - drawn), style="dim")
    if edge > total:
        bar.append(f" {(edge - total) / GIB:.1f} GiB too much", style="bold red")
    return bar


def _facts(plan: Plan) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in _lines(plan):
        table.add_row(Text(name, style="dim"), Text(value))
    return table


def _lines(plan: Plan) -> Iterable[tuple[str, str]]:
    chosen, config, host = plan.choice.chosen, plan.train_config, plan.host
    yield "settings", str(chosen.candidate)
    times, rows = config.gradient_accumulation_steps, config.micro_batch_size
    yield "optimizer step", f"{times} x {rows} x {config.sequence_length} tokens a card"
    if chosen.time is not None:
        time = chosen.time
        shares = (("products", time.products), ("memory traffic", time.traffic), ("waiting", time.waiting))
        yield "", f"{time.seconds:.2f} s: " + ", ".join(f"{name} {part / time.seconds:.0%}" for name, part in shares)
    if plan.machine.link is not None and plan.machine.count > 1:
        yield "interconnect", f"{plan.machine.link.name}, {plan.machine.link.gpu_gb_s:.1f} GB/s"
    if plan.choice.longest_sequence is not None:
        bound = plan.choice.longest_sequence
        context = plan.model.base.model.config.max_positions
        past = f", past the model's context of {context:,}" if bound.value > context else ""
        yield "longest sequence", f"at least {bound.value:,} tokens{past} ({bound.by.candidate.settings_text})"
    if plan.choice.largest_micro_batch is not None:
        yield (
            "largest micro-batch",
            f"at least {_rows(plan.choice.largest_micro_batch.value)} a card, as chosen otherwise",
        )
    there = "" if host.memory_there is None else f" of {host.memory_there / GIB:.1f}"
    yield "host memory", f"{host.memory / GIB:.1f}{there} GiB ({host.pinned / GIB:.1f} pinned for the cards)"
    free = "" if host.disk_free is None else f"; {host.disk_free / GIB:.0f} free"
    yield "disk", f"checkpoints {host.checkpoints / GIB:.1f} GiB, a merged export {host.export / GIB:.1f}{free}"
    if plan.rows is not None:
        yield "rows", f"{plan.rows.rows:,} with {plan.rows.tokens:,} tokens, {1 - plan.rows.filled:.0%} padding"
    if plan.duration is not None:
        cost = "" if plan.duration.cost is None else f", {plan.duration.cost:,.2f} at the given price"
        yield "run", f"{plan.duration.steps:,} steps, {_clock(plan.duration.seconds)}{cost}"


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _clock(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{max(1, minutes)} min"


def _alternatives(plan: Plan) -> Table:
    table = Table(
        "next best", "GiB a device", "tokens/s", title_justify="left", box=None, padding=(0, 2), header_style="dim"
    )
    for evaluated in plan.choice.alternatives:
        table.add_row(str(evaluated.candidate), _peak(evaluated), _speed(plan, evaluated))
    return table


def _peak(evaluated: Evaluated) -> str:
    about = "about " if evaluated.memory.source == "analytic" else ""
    return f"{about}{evaluated.memory.peak / GIB:.1f}"


def _speed(plan: Plan, evaluated: Evaluated) -> str:
    speed = plan.speed(evaluated)
    return "" if speed is None else f"{speed:,.0f}"
