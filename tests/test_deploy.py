"""The recipes of deploy/: what is in them exists, and what they run is what they say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from zagora_jax.command_line import parse
from zagora_jax.config import TrainConfig

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.fixture
def called(tmp_path, monkeypatch):
    """Programs that write down their arguments, and end with the status in STATUS; returns what was called."""
    for name in ("srun", "scontrol", "python3"):
        program = tmp_path / name
        status = "${STATUS:-0}" if name == "srun" else "0"
        program.write_text(f'#!/bin/bash\nprintf "%s\\n" "{name} $*" >> "{tmp_path}/calls"\nexit {status}\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    return lambda: (tmp_path / "calls").read_text().splitlines()


def slurm(*arguments: str, **variables: str) -> int:
    command = ["bash", str(DEPLOY / "slurm.sh"), *arguments]
    return subprocess.run(command, env=os.environ | variables, check=False, capture_output=True).returncode


def test_slurm_starts_a_process_a_node(called):
    assert slurm("mine.yaml", "--learning-rate", "1e-4") == 0
    (call,) = called()
    assert call.endswith(" python -m zagora_jax.train mine.yaml --learning-rate 1e-4")


@pytest.mark.parametrize(("status", "again"), [(69, True), (75, True), (2, False), (1, False)])
def test_slurm_gives_a_run_another_turn_where_it_can_go_on(called, status, again):
    assert slurm("mine.yaml", STATUS=str(status), SLURM_RESTART_COUNT="1") == status
    assert called()[0].endswith("mine.yaml --resume")
    assert called()[1:] == (["scontrol requeue 77"] if again else [])


def skypilot() -> dict:
    return yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())


def test_the_skypilot_task_has_keys_that_skypilot_knows():
    # https://docs.skypilot.co/en/latest/reference/yaml-spec.html
    task = skypilot()
    assert set(task) <= {"name", "resources", "num_nodes", "workdir", "envs", "file_mounts", "setup", "run", "secrets"}
    assert set(task["resources"]) <= {"accelerators", "disk_size", "cloud", "infra", "use_spot", "any_of", "image_id"}
    assert task["envs"]["EXTRA"] in EXTRAS


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_skypilot_task_starts_a_process_a_node(tmp_path, nodes):
    """Its script runs, with a python that writes down its arguments, which `train` takes."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    variables = {
        **skypilot()["envs"],
        "HOME": str(tmp_path),
        "PATH": os.environ["PATH"],
        "SKYPILOT_NUM_NODES": str(nodes),
        "SKYPILOT_NODE_IPS": "\n".join(f"10.0.0.{node + 1}" for node in range(nodes)),
        "SKYPILOT_NODE_RANK": str(nodes - 1),
    }
    command = ["bash", "-c", skypilot()["run"]]
    done = subprocess.run(command, env=variables, cwd=tmp_path, check=True, capture_output=True, text=True)
    module, *arguments = done.stdout.splitlines()[1:]
    assert module == "zagora_jax.train"
    config = parse(TrainConfig, arguments)
    assert not config.resume
    assert config.process_count == (2 if nodes == 2 else None)
    assert config.coordinator == ("10.0.0.1:29400" if nodes == 2 else None)


def test_scripts_are_bash():
    for text in ((DEPLOY / "slurm.sh").read_text(), skypilot()["setup"], skypilot()["run"]):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_the_dockerfile_copies_and_installs_what_there_is():
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    instructions = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    known = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in instructions} <= known
    for name, rest in instructions:
        if name == "COPY":
            assert all((ROOT / source).exists() for source in shlex.split(rest)[:-1])
        if name == "RUN":
            subprocess.run(["bash", "-n"], input=rest, text=True, check=True)
    (extra,) = (rest.partition("=")[2] for name, rest in instructions if name == "ARG")
    assert extra in EXTRAS
    copied = {shlex.split(rest)[0] for name, rest in instructions if name == "COPY" and len(shlex.split(rest)) == 2}
    assert copied == {"zagora_jax", "models", "sharding"}


@pytest.mark.parametrize("page", [*DEPLOY.glob("*.md"), ROOT / "docs" / "many_machines.md"], ids=lambda page: page.name)
def test_commands_on_the_pages_take_their_options(page):
    """Every option of train and configure that a page names is one."""
    from zagora_jax.commands import ConfigureConfig
    from zagora_jax.options import options_of

    flags = {option.flag for kind in (TrainConfig, ConfigureConfig) for option in options_of(kind).values()}
    others = {"--nodes", "--gpus-per-node", "--num-nodes", "--gpus", "--ipc", "--network", "--env", "--build-arg"}
    others |= {"--nnodes", "--nproc-per-node", "--node-rank", "--rdzv-endpoint", "--shm-size"}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9.-]*[a-z0-9]", page.read_text()))
    assert named - flags - others == set()
