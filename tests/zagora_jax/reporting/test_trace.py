"""The trace of a step: what counts as busy, bare and idle; and a real one of a training step."""

from pathlib import Path

import pytest
from oracles import tiny_llama
from runs import recorder, tiny_config, write_rows

from zagora_jax.errors import UserError
from zagora_jax.reporting.trace import (
    COMPUTATION,
    EXCHANGE,
    HOST_COPY,
    Activity,
    DeviceTrace,
    device_rows,
    kernel_rows,
    read_trace,
    show_trace,
)
from zagora_jax.trainer import train

TRACE = DeviceTrace(
    "GPU:0",
    (
        Activity("gemm", 0.0, 2.0),
        Activity("gemm", 5.0, 6.0),
        Activity("fusion", 1.0, 3.0),  # on another stream, half under the product
        Activity("MemcpyH2D", 2.5, 4.0),  # 1 s after the computation's end
        Activity("ncclDevKernel_AllGather", 5.5, 8.0),
        Activity("MemcpyD2D", 9.0, 10.0),  # within the device: computation's
    ),
)


def test_overlaps_count_once_and_copies_without_computation_are_bare() -> None:
    assert TRACE.seconds == 10.0
    assert TRACE.busy(COMPUTATION) == 5.0
    assert TRACE.busy(HOST_COPY) == 1.5
    assert TRACE.exposed(HOST_COPY) == 1.0
    assert TRACE.busy(EXCHANGE) == 2.5
    assert TRACE.exposed(EXCHANGE) == 2.0
    assert device_rows([TRACE, TRACE]) == [
        ["step", *["10,000.0"] * 2],
        ["computation", *["5,000.0"] * 2],
        ["copies to and from the host", *["1,500.0"] * 2],
        ["exchange between devices", *["2,500.0"] * 2],
        ["bare copies", *["1,000.0"] * 2],
        ["bare exchange", *["2,000.0"] * 2],
        ["idle", *["2,000.0"] * 2],
    ]


def test_kernels_are_summed_by_name_and_the_rest_is_counted() -> None:
    rows = kernel_rows(TRACE, most=1)
    assert rows == [["gemm", "2", "3,000.00", "30.0%"], ["4 others", "4", "7,000.00", "70.0%"]]


def test_a_directory_without_a_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no trace"):
        read_trace(tmp_path)


def test_what_cannot_be_read_is_said_and_ends_nothing(tmp_path: Path) -> None:
    reporter, printed = recorder()
    show_trace(tmp_path, 7, reporter)
    assert "step 7 could not be profiled" in printed()


def test_a_step_that_never_comes_is_refused(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 8)
    config = tiny_config(tiny_llama(tmp_path / "model"), tmp_path / "run", rows, max_steps=2, profile_step=3)
    with pytest.raises(UserError, match=r"--profile-step 3: the run has 2 steps"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_a_profiled_step_is_traced_and_printed(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 8)
    config = tiny_config(tiny_llama(tmp_path / "model"), tmp_path / "run", rows, max_steps=2, profile_step=2)
    reporter, printed = recorder()
    train(config, reporter)
    (device,) = read_trace(tmp_path / "run" / "profile")
    assert 0 < device.busy(COMPUTATION) <= device.seconds
    assert "step 2, in ms" in printed()
    assert device.kernels()[0].name in printed()
