"""States through Orbax and back, bit for bit, and what broken saves leave."""

import errno
import resource
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracles import tiny_llama

from models.lora import initial_adapter
from models.parameters import split
from sharding.exchange import ExchangeErrors
from zagora_jax.base import open_base
from zagora_jax.checkpoints import run_state
from zagora_jax.checkpoints.run_state import SavedStates, StateWriter
from zagora_jax.errors import UserError
from zagora_jax.optimizer import make_optimizer
from zagora_jax.option_groups import LoraConfig
from zagora_jax.train_state import LossScale, TrainState, initial_state

PROGRESS = {"model": "abc", "data": {"next_index": 3}}


@pytest.fixture(scope="module")
def blank(tmp_path_factory):
    """The state before the first step, with 8-bit moments and a loss scale."""
    directory = tiny_llama(tmp_path_factory.mktemp("model"), tokenizer=False)
    lora = LoraConfig(rank=32, targets=["down_proj"])
    base = open_base(str(directory), quantization="nf4", dtype="float16", lora=lora)
    _, _, declared = split(base.model)
    state = initial_state(initial_adapter(declared, seed=0), make_optimizer("adamw_8bit", 1e-3, 0.0), "float16")
    assert {"uint8", "float32", "int32"} == {leaf.dtype.name for leaf in jax.tree.leaves(state)}
    return state


def filled(blank: TrainState, step: int) -> TrainState:
    """A state whose every bit could tell."""
    rng = np.random.default_rng(step)

    def fill(leaf: jax.Array) -> jax.Array:
        if leaf.dtype == np.uint8:
            return jnp.asarray(rng.integers(0, 256, leaf.shape, np.uint8))
        return jnp.asarray(rng.standard_normal(leaf.shape, np.float32) if leaf.dtype == np.float32 else leaf)

    filled = jax.tree.map(fill, blank)
    return filled._replace(
        step=jnp.int32(step), updates=jnp.int32(step - 1), loss_scale=LossScale(jnp.float32(2.0**9), jnp.int32(17))
    )


def write(folder, blank, *steps, keep=10, after_step=0):
    states = StateWriter(folder, keep=keep, after_step=after_step)
    for step in steps:
        states.save(filled(blank, step), PROGRESS)


def steps_in(folder):
    return SavedStates(folder).steps()


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_state_comes_back_bit_for_bit(blank, tmp_path):
    write(tmp_path / "checkpoints", blank, 4)
    states = SavedStates(tmp_path / "checkpoints")
    assert states.steps() == [4]
    states.check(4)
    restored, progress = states.restore(4, blank), states.progress(4)
    adapters = states.adapters(4, blank.adapters)
    expected = filled(blank, 4)
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    for found, leaf in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        assert (found.dtype, found.shape) == (leaf.dtype, leaf.shape)
        assert np.asarray(found).tobytes() == np.asarray(leaf).tobytes()
    assert progress == PROGRESS
    for found, leaf in zip(jax.tree.leaves(adapters), jax.tree.leaves(expected.adapters), strict=True):
        assert np.asarray(found).tobytes() == np.asarray(leaf).tobytes()


def test_a_state_without_loss_scale(blank, tmp_path):
    state = filled(blank, 1)._replace(loss_scale=None, optimizer=optax.EmptyState())
    StateWriter(tmp_path / "checkpoints", keep=1, after_step=0).save(state, PROGRESS)
    assert SavedStates(tmp_path / "checkpoints").restore(1, state).loss_scale is None


def test_the_newest_states_are_kept_and_nothing_else(blank, tmp_path):
    folder = tmp_path / "checkpoints"
    write(folder, blank, 1, 2, 3, 5, keep=2)
    assert steps_in(folder) == [3, 5]
    assert {path.name for path in folder.iterdir()} == {"3", "5"}


def test_states_beyond_the_step_that_a_run_goes_on_from_are_forgotten(blank, tmp_path):
    folder = tmp_path / "checkpoints"
    write(folder, blank, 2, 4, 6)
    write(folder, blank, 4, after_step=2)
    assert steps_in(folder) == [2, 4]


def test_states_behind_links_are_forgotten_by_name_alone(blank, tmp_path):
    """Somebody has moved states to another disk."""
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    write(folder, blank, 2, 4, 6)
    (folder / "2").rename(elsewhere)
    (folder / "2").symlink_to(elsewhere)
    (folder / "8").symlink_to(tmp_path / "nowhere")
    (folder / ".9.removed").symlink_to(tmp_path / "nowhere")
    before = files(elsewhere)
    assert SavedStates(folder).newest_intact(lambda _: None) == 6
    write(folder, blank, 7, keep=2, after_step=6)
    assert {path.name for path in folder.iterdir()} == {"6", "7"}
    assert files(elsewhere) == before


def test_remains_of_broken_saves_are_removed_by_the_writer_alone(blank, tmp_path):
    folder = tmp_path / "checkpoints"
    write(folder, blank, 2)
    for name in (".4.saving", ".6.saving.orbax-checkpoint-tmp", ".1.removed"):
        shutil.copytree(folder / "2", folder / name)
    before = files(folder)
    assert steps_in(folder) == [2]  # a reader may look while a run is saving
    assert files(folder) == before
    write(folder, blank, 4, after_step=2)
    assert {path.name for path in folder.iterdir()} == {"2", "4"}


def test_a_step_is_never_saved_over(blank, tmp_path):
    write(tmp_path / "checkpoints", blank, 2)
    with pytest.raises(RuntimeError, match="the state of step 2 is there already"):
        write(tmp_path / "checkpoints", blank, 2, after_step=2)


@pytest.mark.parametrize("fits", [64, 10_000], ids=["nothing", "all but the arrays"])
def test_a_full_disk_is_one_error_of_the_operating_system(blank, tmp_path, caplog, fits):
    folder = tmp_path / "checkpoints"
    write(folder, blank, 2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (fits, limits[1]))  # bytes a file: Python ignores the signal
    try:
        with pytest.raises(OSError, match="File too large"):
            write(folder, blank, 4, after_step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [record for record in caplog.records if record.exc_info]  # nor is it logged beside
    assert [path.name for path in folder.iterdir()] == ["2"]


def test_a_full_disk_says_nothing_else_on_the_way(tmp_path):
    """Also where some of many arrays are written already, others not yet; in a process whose errors are all seen."""
    program = f"""
import resource, time
from pathlib import Path
import jax.numpy as jnp
from flax import nnx
from zagora_jax.checkpoints.run_state import StateWriter
from zagora_jax.train_state import TrainState

many = {{str(number): jnp.arange(200_000 if number == 7 else 300.0) for number in range(60)}}
state = TrainState(jnp.int32(3), jnp.int32(3), nnx.State({{"x": nnx.Param(jnp.ones(2))}}), many, None)
states = StateWriter(Path({str(tmp_path)!r}), keep=2, after_step=0)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, -1))
for _ in range(3):
    try:
        states.save(state, {{}})
    except OSError as error:
        print(error.strerror)
time.sleep(1)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "File too large\n" * 3
    # jax's CUDA plugin, where it is installed without a driver, logs what it misses.
    of_plugin = ("absl::InitializeLog", "cudart_stub")
    assert [line for line in done.stderr.splitlines() if not any(part in line for part in of_plugin)] == []


def test_a_save_is_not_in_the_way_of_the_next_of_its_step(blank, tmp_path, monkeypatch):
    """As where what a failed save abandoned goes on being written when its folder has been removed."""
    folder = tmp_path / "checkpoints"
    states = StateWriter(folder, keep=2, after_step=0)
    state = blank._replace(step=jnp.int32(2))
    abandoned = []

    def failing(self, temporary, items, progress):
        temporary.mkdir()
        abandoned.append(temporary)
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(StateWriter, "_write", failing)
        with pytest.raises(OSError, match="no space"):
            states.save(state, {})
    abandoned[0].mkdir()
    states.save(state, {})
    assert SavedStates(folder).steps() == [2]


def test_what_reads_back_differently_is_no_state_and_removes_none(blank, tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    write(folder, blank, 2)
    restore = run_state._restore
    monkeypatch.setattr(run_state, "_restore", lambda *args: jax.tree.map(lambda leaf: leaf + 1, restore(*args)))
    with pytest.raises(OSError, match=r"reads back differently: adapters\[.*may be broken"):
        write(folder, blank, 4, keep=1, after_step=2)
    monkeypatch.undo()
    assert [path.name for path in folder.iterdir()] == ["2"]
    SavedStates(folder).check(2)


def test_a_folder_that_does_not_exist_holds_no_state(tmp_path):
    assert steps_in(tmp_path / "checkpoints") == []
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_damage_to_any_file_is_found(blank, tmp_path, damage):
    folder = tmp_path / "checkpoints"
    write(folder, blank, 2, 3)
    paths = [path for path in (folder / "3").rglob("*") if path.is_file()]
    assert {"manifest.json", "progress.json", "_METADATA", "manifest.ocdbt"} <= {path.name for path in paths}
    for path in paths:
        content = path.read_bytes()
        if damage == "missing":
            path.unlink()
        elif damage == "cut":
            path.write_bytes(content[: len(content) // 2])
        else:
            middle = len(content) // 2
            path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        if content or damage == "missing":
            message = rf"{folder}/3: the checkpoint is damaged \(.*\). The checkpoints here are 2, 3: use another one"
            with pytest.raises(UserError, match=message):
                SavedStates(folder).check(3)
        path.write_bytes(content)
    SavedStates(folder).check(3)


def test_an_array_of_another_shape_is_named(blank, tmp_path):
    write(tmp_path / "checkpoints", blank, 2)
    wider = jax.tree.map(lambda leaf: jnp.zeros((*leaf.shape, 2), leaf.dtype), blank.adapters)
    with pytest.raises(
        UserError, match=r"checkpoints/2: adapters\['model'\].*: expected float32\[.*, 2\], found float32"
    ):
        SavedStates(tmp_path / "checkpoints").adapters(2, wider)
    with pytest.raises(UserError, match=r"training\['loss_scale'\].clean_steps: expected nothing, found int32\[\]"):
        SavedStates(tmp_path / "checkpoints").restore(2, blank._replace(loss_scale=None))


def test_what_the_exchange_keeps_is_left_behind_where_it_is_anothers(blank, tmp_path):
    state = filled(blank, 1)._replace(residuals=ExchangeErrors(scattered=jnp.ones((2, 8), jnp.bfloat16)))
    StateWriter(tmp_path / "checkpoints", keep=1, after_step=0).save(state, PROGRESS)
    states = SavedStates(tmp_path / "checkpoints")
    assert np.array_equal(states.restore(1, state).residuals.scattered, state.residuals.scattered)
    zeros = ExchangeErrors(scattered=jnp.zeros((4, 8), jnp.bfloat16))
    with pytest.raises(
        UserError, match=r"exchange\['residuals'\].scattered: expected bfloat16\[4, 8\], found bfloat16"
    ):
        states.restore(1, blank._replace(residuals=zeros))
    assert states.restore(1, blank._replace(residuals=zeros), exchange=False).residuals == zeros
