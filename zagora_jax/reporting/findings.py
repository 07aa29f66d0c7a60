"""The report of the command check, for a person to read."""

from typing import Any

from rich.console import Console

from zagora_jax.checking import Report

STYLES = {"error": "bold red", "warning": "yellow"}


def show(report: Report, console: Console) -> None:
    """Print facts by subject, then what deserves a look, the errors last."""
    for subject, facts in report.facts.items():
        console.print(f"[bold]{subject.replace('_', ' ')}")
        for name, value in facts.items():
            if text := _written(value):
                console.print(f"  {name.replace('_', ' ')}: {text}", markup=False, soft_wrap=True)
    for level in ("warning", "error"):
        for finding in report.findings:
            if finding.level == level:
                console.print(f"{level}: {finding.subject}: ", style=STYLES[level], end="")
                console.print(finding.message, markup=False, soft_wrap=True)
    errors = sum(finding.level == "error" for finding in report.findings)
    console.print("passed" if report.passed else f"failed: {errors} errors", style="bold")


def _written(value: Any) -> str:
    """A value in words; empty for what says nothing, such as a count of no rows."""
    match value:
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case {"count": int(count), "first": list(first)}:
            places = "; ".join(f"{place['file']}, {place['unit']} {place['number']}" for place in first)
            return f"{count:,} ({places})" if count else ""
        case dict():
            return ", ".join(f"{name} {_written(item)}" for name, item in value.items())
        case list():
            return "; ".join(_written(item) for item in value)
        case None:
            return "none"
    return str(value)
