"""The command line that all commands share: `[CONFIG.yaml] --option value ...`."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zagora_jax.config_file import read_file, read_list, read_scalar
from zagora_jax.errors import UserError, in_words
from zagora_jax.hanging import FAILED, leave
from zagora_jax.interruption import STOPPED, Interrupted, interruptible
from zagora_jax.option_groups import CommandConfig
from zagora_jax.options import COMMAND_LINE, C, Given, Option, build, nearest, options_of
from zagora_jax.reporting.terminal import enduring_output, visible

YAML_HINT = (
    "Lists are written a,b or [a, b]. CONFIG.yaml holds the same options, with underscores, and nested where a name "
    "has a dot (lora: {rank: 8})."
)


def run_command(config_class: type[C], main: Callable[[C], int | None]) -> int:
    """Run a command on the process's arguments and return its exit status.

    What a user can correct is printed in one piece, without a traceback, and ends with status 2. SIGTERM, SIGINT
    and SIGHUP end with status 75 (`interruption.STOPPED`); where work would be lost, with 128 and the signal's number.
    Output that cannot be written ends no work; it makes a status of 0 a 2, unless a reader just wanted no more.
    """
    os.umask(os.umask(0) | 0o002)  # no file is writable for everybody
    with enduring_output() as output, interruptible():
        try:
            status = main(parse(config_class, sys.argv[1:])) or 0
        except UserError as error:
            print(visible(f"error: {error}"), file=sys.stderr)
            status = FAILED
        except OSError as error:
            print(visible(f"error: {in_words(error)}"), file=sys.stderr)
            status = FAILED
        except RuntimeError as error:  # of XLA, for all but training, which tells more
            from zagora_jax.out_of_memory import out_of_memory

            if (reason := out_of_memory(error)) is None:
                raise
            print(visible(f"error: {reason}"), file=sys.stderr)
            status = FAILED
        except Interrupted as signal:
            print(f"{signal}: stopped; nothing is lost, nothing half written", file=sys.stderr)
            status = STOPPED
    if output.lost:
        print(f"error: standard output: cannot be written: {output.lost.strerror}", file=sys.stderr)
        status = status or FAILED
    return leave(status)


def parse(config_class: type[C], arguments: Sequence[str]) -> C:
    """Make a command's configuration: the command line goes before the YAML file, and that before the defaults.

    Raises:
        UserError: an argument or a line of the file is wrong.
        SystemExit: help was asked for and printed.
    """
    if "-h" in arguments or "--help" in arguments:
        print(help_text(config_class), end="")
        raise SystemExit(0)
    options = options_of(config_class)
    positionals, texts = _split(arguments, options)
    given: dict[str, Given] = {}
    if positionals and _is_file(config_class, positionals[0]):
        given = read_file(config_class, Path(positionals.pop(0)))
    for name in (config_class.positional,) if config_class.positional else config_class.shorthand:
        if not positionals:
            break
        if name in texts:
            raise UserError(f"{COMMAND_LINE}: {name} is given twice: {positionals[0]} and {texts[name]}")
        texts[name] = positionals.pop(0)
    if positionals:
        raise UserError(f"{COMMAND_LINE}: unexpected argument {positionals[0]}; options are written --name value")
    given |= {name: Given(_read(options[name], text), COMMAND_LINE) for name, text in texts.items()}
    return build(config_class, given)


def _is_file(config_class: type[CommandConfig], argument: str) -> bool:
    """Whether the first argument without a name is the YAML file."""
    if config_class.shorthand:
        return argument.endswith((".yaml", ".yml"))
    return not config_class.positional


def places_of(config_class: type[CommandConfig]) -> str:
    """What stands behind a command without a name, as its usage shows it."""
    if config_class.positional:
        return config_class.positional.upper()
    shorthand = " ".join(name.upper() for name in config_class.shorthand)
    return f"[CONFIG.yaml | {shorthand}]" if shorthand else "[CONFIG.yaml]"


def _split(arguments: Sequence[str], options: Mapping[str, Option]) -> tuple[list[str], dict[str, str]]:
    """Part the arguments into those known by place and the options' texts by name."""
    positionals: list[str] = []
    texts: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("-"):
            positionals.append(argument)
            continue
        flag, equals, text = argument.partition("=")
        if not equals and (negated := _negated(flag, options)):
            option, text = negated, "false"
        else:
            option = _find(flag, options)
        if not equals and not text:
            if _takes(option, rest):
                text = rest.pop(0)
            elif bool in option.types:
                text = "true"
            else:
                found = f"{rest[0]}; a value that begins with -- is written {option.flag}=VALUE" if rest else "none"
                raise UserError(f"{COMMAND_LINE}: {option.flag}: expected a value after it, found {found}")
        if option.name in texts:
            raise UserError(f"{COMMAND_LINE}: {option.flag} is given twice: {texts[option.name]} and {text}")
        texts[option.name] = text
    return positionals, texts


def _negated(flag: str, options: Mapping[str, Option]) -> Option | None:
    """Return the boolean option that a flag switches off: `--no-packing` is `--packing false`."""
    option = options.get(flag.removeprefix("--no-").replace("-", "_")) if flag.startswith("--no-") else None
    return option if option is not None and bool in option.types else None


def _find(flag: str, options: Mapping[str, Option]) -> Option:
    name = flag.removeprefix("--").replace("-", "_")
    if flag.startswith("--") and name in options:
        return options[name]
    close = nearest(flag.lstrip("-"), options)
    advice = f"the nearest is {close.flag}" if close else "--help lists the options"
    raise UserError(f"{COMMAND_LINE}: unknown option {flag}; {advice}")


def _takes(option: Option, rest: Sequence[str]) -> bool:
    """Whether the next argument is the value of `option`; a boolean one can do without, as in `--packing run.yaml`."""
    if not rest or rest[0].startswith("--"):
        return False
    return bool not in option.types or not rest[0].endswith((".yaml", ".yml"))


def _read(option: Option, text: str) -> object:
    if list in option.types:
        if text.startswith(("[", "'", '"')):
            return read_list(option, text)
        if "," in text:
            return [read_scalar(option, part.strip()) for part in text.split(",")]
    return read_scalar(option, text)


def help_text(config_class: type[CommandConfig]) -> str:
    """Lay out the options of a command under their headings."""
    place = places_of(config_class)
    parser = argparse.ArgumentParser(
        usage=f"python -m zagora_jax.{config_class.command} {place} [--option value ...]",
        description=config_class.__doc__,
        epilog=None if config_class.positional else YAML_HINT,
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=110),
    )
    group = parser.add_argument_group("Options")
    for option in options_of(config_class).values():
        if option.name in config_class.headings:
            group = parser.add_argument_group(config_class.headings[option.name])
        text = f"{option.field.description} [{option.default}]" if option.default else f"{option.field.description}"
        if option.name == config_class.positional:
            group.add_argument(place, help=text.replace("%", "%%"))
        else:
            group.add_argument(option.flag, metavar=option.values, help=text.replace("%", "%%"))
    return parser.format_help()
