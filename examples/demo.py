"""What `make demo` runs: a small real Llama learns about an airship that never flew.

Fetches SmolLM2-135M-Instruct, asks it twenty held-out questions, fine-tunes it with NF4 and LoRA as
examples/zagora/demo.yaml says, asks again, and exports Hugging Face files. The exit status is 1 where fewer than 70 %
of the answers are right afterwards.
"""

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from fetch_smollm2 import DEFAULT_FOLDER, fetch
from rich.markup import escape
from rich.table import Table

from zagora_jax.command_line import parse
from zagora_jax.commands import ExportConfig
from zagora_jax.config import TrainConfig
from zagora_jax.errors import UserError
from zagora_jax.exporter import export
from zagora_jax.generation import Sampling, open_generator
from zagora_jax.reporting.progress import Reporter
from zagora_jax.trainer import train

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIG = Path("examples/zagora/demo.yaml")
EXPORT = Path("runs/demo/merged")
NEEDED = 0.7  # of the answers


@dataclass(frozen=True)
class Question:
    """A held-out question and the words that its answer must hold."""

    text: str
    answer: str

    def is_answered_by(self, reply: str) -> bool:
        """Whether `reply` holds the answer, in any case, with anything around it."""
        return self.answer.casefold() in reply.casefold()


def main() -> int:
    """Tell the story; returns the exit status."""
    os.chdir(REPOSITORY)
    reporter = Reporter()
    console = reporter.console
    console.rule("[bold]1. A real model: SmolLM2-135M-Instruct", align="left")
    model = str(fetch(DEFAULT_FOLDER))
    config = parse(TrainConfig, [str(CONFIG), "--model", model])
    questions = [question for file in config.eval_data or [] for question in read_questions(Path(file))]
    shutil.rmtree(config.output, ignore_errors=True)  # an earlier demo's

    console.rule(f"[bold]2. {len(questions)} questions before training", align="left")
    before = ask(model, questions)
    console.rule("[bold]3. Training", align="left")
    result = train(config, reporter)
    console.rule("[bold]4. The same questions after training", align="left")
    after = ask(str(result.run_directory), questions)
    console.rule("[bold]5. Export", align="left")
    exported = export(parse(ExportConfig, [str(result.run_directory), "--to", str(EXPORT)]), reporter)

    console.rule("[bold]What came of it", align="left")
    console.print(side_by_side(questions, before, after))
    right_before, right_after = count_right(questions, before), count_right(questions, after)
    console.print(f"held-out loss: {result.loss_before:.3f} before, {result.loss_after:.3f} after")
    console.print(f"right answers: {right_before} of {len(questions)} before, {right_after} of {len(questions)} after")
    console.print(f"run:           {result.run_directory} (adapter/, checkpoints/, metrics.jsonl, config.yaml)")
    console.print(f"exported:      {exported.directory} ({', '.join(exported.files)})")
    if right_after < NEEDED * len(questions):
        console.print(f"[red]fewer than {NEEDED:.0%} of the answers are right")
        return 1
    return 0


def read_questions(file: Path) -> list[Question]:
    """The questions of a file of {messages} rows, each with one question and its answer."""
    rows = [json.loads(line)["messages"] for line in file.read_text("utf-8").splitlines()]
    return [Question(question["content"], answer["content"].rstrip(".")) for question, answer in rows]


def ask(model: str, questions: list[Question]) -> list[str]:
    """What a base model or a run's tuned model answers."""
    return open_generator(model).answer([question.text for question in questions], Sampling(max_new_tokens=20))


def count_right(questions: list[Question], replies: list[str]) -> int:
    """How many questions are answered."""
    return sum(question.is_answered_by(reply) for question, reply in zip(questions, replies, strict=True))


def side_by_side(questions: list[Question], before: list[str], after: list[str]) -> Table:
    """A table of the answers before and after; a wrong last one shows the right one too."""
    table = Table("question", "before", "after", show_lines=True)
    for question, *replies in zip(questions, before, after, strict=True):
        before_cell, after_cell = (
            f"[{'green' if question.is_answered_by(reply) else 'red'}]{escape(' '.join(reply.split()))}[/]"
            for reply in replies
        )
        correction = "" if question.is_answered_by(replies[-1]) else f" (expected: {escape(question.answer)})"
        table.add_row(escape(question.text), before_cell, after_cell + correction)
    return table


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
