"""Which process of how many this is, by options and by what launchers tell."""

from __future__ import annotations

import pytest

from zagora_jax import launch
from zagora_jax.config import TrainConfig
from zagora_jax.errors import UserError
from zagora_jax.launch import Place, find_place

TORCHRUN = {
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "RANK": "3", "WORLD_SIZE": "4",
    "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "1",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911",
}  # fmt: skip
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}


def options(**given):
    return TrainConfig(model="any", data=None, **given)


GIVEN = options(coordinator="10.0.0.9:1234", process_count=2, process_index=1)


def test_without_options_and_launcher_a_process_is_alone():
    assert find_place(options(), {}) is None
    assert find_place(options(process_count=1), KUBERNETES) is None
    assert find_place(options(), TORCHRUN | {"WORLD_SIZE": "1"}) is None
    assert find_place(options(), SLURM | {"SLURM_NTASKS": "1"}) is None


@pytest.mark.parametrize(
    ("config", "environment", "expected"),
    [
        (GIVEN, {}, Place("options", "10.0.0.9:1234", 2, 1)),
        (options(), TORCHRUN, Place("torchrun", "10.0.0.1:29500", 4, 3, None, (1, 2))),
        # Where torchrun's agent listens at that port itself.
        (
            options(),
            TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"},
            Place("torchrun", "10.0.0.1:29501", 4, 3, None, (1, 2)),
        ),
        (options(), SLURM, Place("SLURM", None, 2, 1, "slurm", (0, 1))),
        (options(coordinator="node1:9"), SLURM, Place("SLURM", "node1:9", 2, 1, "slurm", (0, 1))),
        (options(), OPEN_MPI, Place("Open MPI", None, 2, 1, "ompi", (1, 2))),
        (options(), KUBERNETES, Place("Kubernetes", None, None, 1, "k8s")),
        (options(), SLURM | TORCHRUN, Place("torchrun", "10.0.0.1:29500", 4, 3, None, (1, 2))),
    ],
)
def test_a_place_is_found(config, environment, expected):
    assert find_place(config, environment) == expected


@pytest.mark.parametrize(
    ("config", "environment", "message"),
    [
        (GIVEN, TORCHRUN, "--process-count 2: contradicts torchrun, in whose environment it is 4"),
        (options(process_index=0), SLURM, "--process-index 0: contradicts SLURM, .* it is 1"),
        (options(coordinator="a:1"), TORCHRUN, "--coordinator a:1: contradicts torchrun, .* 10.0.0.1:29500"),
        (options(process_count=2), {}, "--process-count 2: give --coordinator and --process-index too"),
        (options(process_index=2, process_count=2, coordinator="a:1"), {}, "--process-index 2: there are 2 processes"),
        (options(), TORCHRUN | {"RANK": "one"}, "RANK=one: expected a number"),
        (options(), {k: v for k, v in OPEN_MPI.items() if "uri" not in k}, "Open MPI started 2 .* give --coordinator"),
        (options(), SLURM | {"SLURM_STEP_TASKS_PER_NODE": "x"}, "SLURM_STEP_TASKS_PER_NODE=x: expected such as"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(config, environment, message):
    with pytest.raises(UserError, match=message):
        find_place(config, environment)


@pytest.mark.parametrize("coordinator", ["host", "host:", "http://host:1", "host:port"])
def test_a_coordinator_without_a_port_is_refused(coordinator):
    with pytest.raises(ValueError, match="coordinator"):
        options(coordinator=coordinator)


@pytest.mark.parametrize(
    ("local", "visible", "expected"),
    [(None, 4, None), ((0, 1), 4, [0, 1, 2, 3]), ((1, 2), 4, [2, 3]), ((3, 4), 1, [0]), ((1, 4), 0, [0])],
)
def test_gpus_are_shared_out_by_processes_of_a_machine(monkeypatch, local, visible, expected):
    monkeypatch.setattr(launch, "installed_gpus", lambda: [1] * visible)
    assert Place("torchrun", "a:1", 4, 1, local=local).gpus() == expected


@pytest.mark.parametrize(("node", "tasks"), [("0", 2), ("2", 2), ("3", 1)])
def test_slurm_tells_how_many_tasks_a_machine_has(node, tasks):
    environment = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": node}
    assert find_place(options(), environment).local == (0, tasks)
