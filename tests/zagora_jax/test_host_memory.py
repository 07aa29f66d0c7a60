"""What a run may pin of the host's memory."""

import os
from types import SimpleNamespace

import pytest

from zagora_jax import host_memory
from zagora_jax.config import TrainConfig
from zagora_jax.errors import UserError
from zagora_jax.host_memory import LIMIT, allow_pinned_memory, free_memory, require_pinned_memory
from zagora_jax.option_groups import OffloadConfig

GIB = 2**30


@pytest.fixture
def host(monkeypatch, tmp_path):
    """A host of 256 GiB, of which 200 are free, whose process is in a control group without a limit."""
    memory = SimpleNamespace(total=256 * GIB, available=200 * GIB)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: memory)
    groups, own = tmp_path / "cgroup", tmp_path / "own"
    (groups / "box" / "run").mkdir(parents=True)
    own.write_text("0::/box/run\n")
    monkeypatch.setattr(host_memory, "_CGROUPS", groups)
    monkeypatch.setattr(host_memory, "_OWN_CGROUPS", own)
    monkeypatch.setenv(LIMIT, "0")  # so that what the environment had comes back
    monkeypatch.delenv(LIMIT)
    return groups


def limit(folder, gib, used, cached):
    (folder / "memory.max").write_text(f"{gib * GIB}\n")
    (folder / "memory.current").write_text(f"{used * GIB}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cached * GIB}\n")


def config(**offload):
    return TrainConfig(model="m", offload=OffloadConfig(**offload))


def test_xla_may_pin_what_the_host_has(host):
    allow_pinned_memory(config(weights="all"))
    assert os.environ[LIMIT] == "252"
    require_pinned_memory(190 * GIB, "gpu")


def test_a_limit_that_was_set_stays(host, monkeypatch):
    monkeypatch.setenv(LIMIT, "80")
    allow_pinned_memory(config(optimizer=True))
    assert os.environ[LIMIT] == "80"
    with pytest.raises(
        UserError, match=rf"keeps 90.0 GiB in pinned host memory, but XLA pins at most 80 GiB: set {LIMIT}"
    ):
        require_pinned_memory(90 * GIB, "gpu")


def test_without_anything_to_keep_there_the_limit_stays(host):
    allow_pinned_memory(config())
    assert LIMIT not in os.environ


def test_a_control_group_bounds_what_is_free(host):
    """The group above the process's own has the limit; the file cache counts as free."""
    limit(host / "box", 100, used=60, cached=50)
    (host / "box" / "run" / "memory.max").write_text("max\n")
    assert free_memory() == 90 * GIB
    allow_pinned_memory(config(activations=True))
    assert os.environ[LIMIT] == "96"
    with pytest.raises(UserError, match=r"keeps 88.0 GiB .* only 90.0 GiB of the host's memory are free"):
        require_pinned_memory(88 * GIB, "gpu")


def test_a_control_group_of_the_first_version(host, monkeypatch):
    folder = host / "memory" / "box"
    folder.mkdir(parents=True)
    host_memory._OWN_CGROUPS.write_text("3:cpu:/box\n2:memory:/box\n")
    (folder / "memory.limit_in_bytes").write_text(f"{40 * GIB}")
    (folder / "memory.usage_in_bytes").write_text(f"{10 * GIB}")
    (folder / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {2 * GIB}\n")
    assert free_memory() == 32 * GIB


def test_a_cpu_pins_nothing_by_xla(host):
    require_pinned_memory(190 * GIB, "cpu")
    with pytest.raises(UserError, match=r"only 200\.0 GiB"):
        require_pinned_memory(197 * GIB, "cpu")


def test_a_step_that_pins_nothing_needs_nothing(host):
    limit(host / "box", 3, used=2, cached=0)
    require_pinned_memory(0, "gpu")
