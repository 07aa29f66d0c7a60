import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from zagora_jax.reporting.terminal import SafeConsole, visible

FULL = Path("/dev/full")
# A command whose work comes after its output: more than a pipe holds, on both streams, then a file.
COMMAND = """
import pathlib, sys
from zagora_jax.command_line import run_command
from zagora_jax.commands import GenerateConfig
from zagora_jax.reporting.terminal import SafeConsole

def main(config):
    for line in range(3000):
        SafeConsole().print(f"line {line} of a training whose reader is gone")
        print("a warning of the same length as that line is", file=sys.stderr)
    pathlib.Path(config.prompt).write_text("finished")

sys.exit(run_command(GenerateConfig, main))
"""


def test_control_characters_are_made_visible_and_nothing_else_is_changed():
    assert visible("\x1b[31mé\t😀\n\x7f\x00") == "␛[31mé\t😀\n␡␀"
    assert visible("\x9b31m\x85\x80\x9f\xa0") == "\\x9b31m\\x85\\x80\\x9f\xa0"


def test_a_console_prints_text_as_it_stands():
    console = SafeConsole(file=io.StringIO(), width=60, force_terminal=True, color_system=None)
    console.print("[bold]:smile: \x9b31m \x1b]0;title\x07", markup=False)
    table = Table.grid()
    table.add_row("cell\x1b[2J")
    console.print(table)
    console.rule("rule\x1b[2J")
    printed = console.file.getvalue()
    assert "[bold]:smile: \\x9b31m ␛]0;title␇" in printed
    assert "cell␛[2J" in printed
    assert "rule␛[2J" in printed
    assert not set(printed) & {"\x1b", "\x9b", "\x07"}


def run(tmp_path, **streams):
    done = tmp_path / "done"
    command = [sys.executable, "-c", COMMAND, "model", "--prompt", str(done)]
    process = subprocess.Popen(command, **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams))
    return process, done


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_reader_that_goes_away_ends_no_work(tmp_path, closed):
    process, done = run(tmp_path)
    getattr(process, closed).close()
    other = process.stderr if closed == "stdout" else process.stdout
    printed = other.read()  # all of it, and no traceback
    assert printed.count(b"\n") == 3000
    assert process.wait() == 0
    assert done.read_text() == "finished"


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
def test_output_that_is_lost_ends_no_work_but_is_told(tmp_path):
    with FULL.open("w") as full:
        process, done = run(tmp_path, stdout=full)
        *_, last = process.communicate()[1].decode().splitlines()
    assert last == "error: standard output: cannot be written: No space left on device"
    assert process.returncode == 2
    assert done.read_text() == "finished"


def test_a_stream_that_was_closed_from_the_start(tmp_path):
    process, done = run(tmp_path, preexec_fn=lambda: os.close(1))
    assert process.communicate()[1].count(b"\n") == 3000
    assert process.returncode == 0
    assert done.read_text() == "finished"


def test_help_into_a_pipe_that_is_closed():
    process = subprocess.Popen(
        [sys.executable, "-m", "zagora_jax.train", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 0


def test_what_the_encoding_does_not_have_is_escaped(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    code = COMMAND.replace("line {line} of", "é \\udcff of").replace("range(3000)", "range(1)")
    done = tmp_path / "done"
    result = subprocess.run(
        [sys.executable, "-c", code, "model", "--prompt", str(done)], capture_output=True, check=True
    )
    assert result.stdout == b"\\xe9 \\udcff of a training whose reader is gone\n"
