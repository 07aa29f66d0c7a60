"""Writes docs/options.md from the options of all commands: `python docs/generate_options.py`."""

from pathlib import Path

from zagora_jax.command_line import places_of
from zagora_jax.commands import COMMANDS
from zagora_jax.option_groups import CommandConfig
from zagora_jax.options import options_of

OPTIONS_PAGE = Path(__file__).with_name("options.md")

INTRODUCTION = """\
<!-- Written by docs/generate_options.py from zagora_jax/config.py, commands.py and option_groups.py; change those. -->
# Options

`train`, `check` and `preview` read their options from a YAML file, from the command line, or from both:

    python -m zagora_jax.train CONFIG.yaml --lora.rank 32 --data rows.jsonl,more.jsonl --packing

The command line goes before the YAML file, and that before the defaults. In YAML a name is written as in the tables
below, nested where it has a dot. On the command line `--max-steps` and `--max_steps` are the same. A boolean option
alone means true. Lists are written `a,b` or `[a, b]`; a list of one needs no brackets, except for `lora.targets`,
where a text is a regular expression (`'[q_proj]'`). `null` stands for a value that is not given. Paths are relative to
the working directory. Numbers and booleans are read as in YAML 1.2: `1e-4` is a number, `yes` is not a boolean.

An editor that knows YAML can complete and check these options by the JSON Schema that this line prints:

    python -c 'import json, zagora_jax.config as c; print(json.dumps(c.TrainConfig.model_json_schema(), indent=2))'
"""


def options_page() -> str:
    """Lay out the page: a section a command, a table of its options each."""
    return "\n".join([INTRODUCTION, *(_section(command) for command in COMMANDS)])


def _section(command: type[CommandConfig]) -> str:
    place = places_of(command)
    base = command.__base__
    inherited = set(base.model_fields) if base is not None and issubclass(base, CommandConfig) else set()
    rows = [
        "| option | value | default | meaning |",
        "|---|---|---|---|",
        *(
            f"| `{option.name}` | `{_escaped(option.values)}` | {_escaped(option.default)} "
            f"| {_escaped(option.field.description or '')} |"
            for option in options_of(command).values()
            if option.name.partition(".")[0] not in inherited
        ),
    ]
    title = f"## {command.command}\n\n{command.__doc__}\n\n    python -m zagora_jax.{command.command} {place}\n"
    return "\n".join([title, *rows, ""])


def _escaped(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    OPTIONS_PAGE.write_text(options_page(), encoding="utf-8")
