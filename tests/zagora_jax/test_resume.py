"""Runs that are killed and go on, against unbroken ones: bit for bit the same."""

import hashlib
import json
import random
import shutil
import signal

import pytest
from oracles import tiny_llama
from runs import Child, numbers, recorder, remains, tiny_config, write_rows

from zagora_jax.checkpoints.peft import read_adapter
from zagora_jax.checkpoints.run_state import SavedStates
from zagora_jax.commands import ExportConfig
from zagora_jax.config import TrainConfig
from zagora_jax.errors import UserError
from zagora_jax.option_groups import LoraConfig
from zagora_jax.run_directory import RunDirectory, read_metrics
from zagora_jax.trainer import train

# Everything that has a state of its own: 8-bit moments (down_proj's A is large enough for them), dropout, an order of
# rows for each epoch, rows packed anew in each, a learning rate that falls, short last windows.
EVERYTHING = {
    "optimizer": "adamw_8bit",
    "lora": LoraConfig(rank=32, targets=["q_proj", "down_proj"], dropout=0.1),
    "packing": True,
    "micro_batch_size": 1,
    "epochs": 3,
    "warmup_steps": 2,
    "save_every": 3,
    "keep_checkpoints": 1,
}
COMPILING = ": part _compile_step"
# 20 kills of a run in every run of the tests, and 5 of an export; 200 and 50 in the slow ones, in independent parts
# that several processes can share: `pytest -m slow -n 12`.
SLOW = pytest.mark.slow
PLAIN = {"quantization": "none", "schedule": "constant", "max_steps": 8, "save_every": 3, "keep_checkpoints": 5}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A model, rows, and children that compile each program once."""
    folder = tmp_path_factory.mktemp("resume")
    tiny_llama(folder / "model")
    write_rows(folder / "rows.jsonl", 11)
    write_rows(folder / "held_out.jsonl", 3, first=20)
    return folder, Child(folder / "compiled")


def configure(folder, run, **options):
    return tiny_config(folder / "model", run, options.pop("rows", folder / "rows.jsonl"), **options)


@pytest.fixture(scope="module")
def everything(world):
    folder, child = world
    options = EVERYTHING | {"eval_data": [folder / "held_out.jsonl"], "eval_every": 2}
    return options, child.train(configure(folder, folder / "everything", **options))


@pytest.fixture(scope="module")
def plain(world):
    folder, child = world
    child.train(configure(folder, folder / "plain", **PLAIN))
    return folder / "plain"


@pytest.fixture
def copy(plain, tmp_path):
    return shutil.copytree(plain, tmp_path / "run")


def assert_same_run(found, expected):
    assert numbers(found) == numbers(expected)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (found / "adapter" / name).read_bytes() == (expected / "adapter" / name).read_bytes(), name
    for name in ("loss_before", "loss_after"):
        assert RunDirectory(found).read_report().get(name) == RunDirectory(expected).read_report().get(name)


def assert_sound(run):
    """Whatever moment a run was killed at, what stands under a final name is whole."""
    directory = RunDirectory(run)
    directory.read_report()
    numbers(run)
    states = SavedStates(directory.checkpoints)
    for step in states.steps():
        states.check(step)
    if directory.adapter.is_dir() and any(directory.adapter.glob("adapter_config.json")):
        read_adapter(directory.adapter)


def test_a_run_that_is_killed_again_and_again_ends_as_the_unbroken_one(world, everything, tmp_path):
    folder, child = world
    options, _ = everything
    run = tmp_path / "run"
    left = []
    child.break_off(configure(folder, run, **options), "metrics 2")
    for moment in (
        r"rename .*/checkpoints/6$",  # after beginning anew, since nothing was saved; the adapter is of step 6 already
        r"rmdir \S*/\.9\.removed$",  # step 12, the last, is saved; not done is to forget step 9 and to evaluate
    ):
        assert_sound(run)
        child.break_off(configure(folder, run, resume=True, **options), moment)
        left += remains(run)
    assert left
    finished = child.train(configure(folder, run, resume=True, **options))
    assert "finished already" not in finished.printed
    assert not any("metrics" in moment for moment in finished.moments)
    assert_same_run(run, folder / "everything")
    assert remains(run) == []
    assert [line["step"] for line in numbers(run)] == list(range(1, 13))


@pytest.mark.parametrize(("part", "kills"), [(0, 20), *(pytest.param(part, 10, marks=SLOW) for part in range(1, 21))])
def test_kills_at_random_times_lose_nothing(world, everything, tmp_path, part, kills):
    """In any part of a run: each run is killed, gone on with and killed again until it is complete, and begun anew.

    One kill in ten falls into the seconds in which programs are compiled.
    """
    folder, child = world
    options, unbroken = everything
    rng = random.Random(part)
    run, complete = tmp_path / "0", 0
    while kills:
        moment, seconds = f"^{rng.randrange(len(unbroken.moments))}: ", rng.choice([0.0, 0.3]) * rng.random()
        if compiles := kills % 10 == 5:
            moment, seconds = COMPILING, 4 * rng.random()
        if child.kill(configure(folder, run, resume=run.exists(), **options), moment, seconds, compiles=compiles):
            kills -= 1
            if run.exists():
                assert_sound(run)
        else:
            assert_same_run(run, folder / "everything")
            complete += 1
            run = tmp_path / str(complete)
    child.train(configure(folder, run, resume=True, **options))
    assert_same_run(run, folder / "everything")
    assert remains(run) == []


@pytest.mark.parametrize(("part", "kills"), [(0, 5), *(pytest.param(part, 10, marks=SLOW) for part in range(1, 6))])
def test_an_export_that_is_killed_is_whole_or_not_there(world, plain, tmp_path, part, kills):
    _, child = world
    expected = tmp_path / "expected"
    unbroken = child.export(ExportConfig(run=plain, to=expected))
    files = {path.relative_to(expected): path.read_bytes() for path in expected.rglob("*") if path.is_file()}
    rng = random.Random(part)
    for _ in range(kills):
        moment = f"^{rng.randrange(len(unbroken.moments))}: "
        child.kill(ExportConfig(run=plain, to=tmp_path / "to"), moment, rng.random() / 5)
        if (tmp_path / "to").exists():
            assert {name: (tmp_path / "to" / name).read_bytes() for name in files} == files
            shutil.rmtree(tmp_path / "to")
    child.export(ExportConfig(run=plain, to=tmp_path / "to"))
    assert {name: (tmp_path / "to" / name).read_bytes() for name in files} == files
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "to"]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_a_kill_at_any_moment_can_be_resumed(world, everything, tmp_path, part):
    """At every fifth moment; an eighth of those in each part."""
    folder, child = world
    options, unbroken = everything
    for number in range(5 * part, len(unbroken.moments), 40):
        run = tmp_path / str(number)
        child.break_off(configure(folder, run, **options), f"^{number}: ")
        assert_sound(run)
        child.train(configure(folder, run, resume=True, **options))
        assert_same_run(run, folder / "everything")
        assert remains(run) == []


def test_an_interrupted_run_goes_on_with_its_files_moved_and_for_longer(world, plain, tmp_path):
    folder, child = world
    run = tmp_path / "run"
    child.break_off(configure(folder, run, **PLAIN | {"max_steps": 6}), "metrics 5", by=signal.SIGINT)
    assert_sound(run)
    rows = shutil.copy(folder / "rows.jsonl", tmp_path / "moved.jsonl")
    model = shutil.copytree(folder / "model", tmp_path / "model")
    run = run.rename(tmp_path / "elsewhere")
    (run / "report.json").unlink()
    finished = child.train(tiny_config(model, run, rows, resume=True, **PLAIN | {"save_every": 4, "log_every": 1}))
    assert "step 5/8" not in finished.printed
    assert "step 6/8" in finished.printed
    assert numbers(run) == numbers(plain)
    weights = "adapter/adapter_model.safetensors"
    assert (run / weights).read_bytes() == (plain / weights).read_bytes()
    states = SavedStates(run / "checkpoints")
    assert states.steps() == [1, 3, 5, 6, 8]


def test_going_back_to_an_older_checkpoint_forgets_the_later_ones(world, plain, copy):
    folder, child = world
    config = configure(folder, copy, resume=copy / "checkpoints" / "3", **PLAIN)
    child.break_off(config, "metrics 4")
    states = SavedStates(copy / "checkpoints")
    assert states.steps() == [1, 3]
    assert numbers(copy) == numbers(plain)[:3]
    weights = "adapter/adapter_model.safetensors"
    assert (copy / weights).read_bytes() != (plain / weights).read_bytes()


def test_a_run_with_a_falling_rate_cannot_be_made_longer(world, everything):
    folder, _ = world
    options, _ = everything
    config = configure(folder, folder / "everything", resume=True, **options | {"epochs": 4})
    with pytest.raises(UserError, match="a run of 12 steps, this one would have 16, and the cosine schedule's"):
        train(config, recorder()[0])


def test_a_finished_run_says_so(world, plain):
    folder, _ = world
    before = {path: path.stat().st_mtime_ns for path in plain.rglob("*")}
    reporter, printed = recorder()
    result = train(configure(folder, plain, resume=True, **PLAIN), reporter)
    assert f"{plain}: finished already, at step 8 of 8" in printed()
    assert result.steps == 8
    assert {path: path.stat().st_mtime_ns for path in plain.rglob("*")} == before


def test_a_new_run_never_mixes_with_another(world, plain):
    folder, _ = world
    with pytest.raises(UserError, match=r"holds a run already \(metrics.jsonl is there\). Give --resume"):
        train(configure(folder, plain, **PLAIN), recorder()[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 2e-2}, "other options: learning_rate 0.01 -> 0.02. Set them back"),
        ({"seed": 1, "packing": True}, "packing False -> True; seed 0 -> 1"),
        (
            {"lora": LoraConfig(rank=8, targets=["q_proj"])},
            r"other options: lora\.rank 4 -> 8; lora\.targets \['q_proj', 'down_proj'\] -> ",
        ),
        ({"schedule": "cosine"}, "schedule 'constant' -> 'cosine'"),
    ],
)
def test_changed_options_are_named(world, plain, changes, message):
    folder, _ = world
    with pytest.raises(UserError, match=message):
        train(configure(folder, plain, resume=True, **PLAIN | changes), recorder()[0])


@pytest.mark.parametrize("change", [{}, {"embeddings": "int8"}])
def test_options_that_a_checkpoint_does_not_mention_are_their_defaults(world, plain, monkeypatch, change):
    """As if it had been saved before those options existed."""
    folder, _ = world
    read = SavedStates.progress

    def without_defaults(states, step):
        progress = read(states, step)
        options = TrainConfig.model_validate({"model": "any", **progress["options"]})
        return {**progress, "options": options.model_dump(mode="json", exclude_defaults=True)}

    monkeypatch.setattr(SavedStates, "progress", without_defaults)
    assert "embeddings" not in SavedStates(plain / "checkpoints").progress(8)["options"]
    config = configure(folder, plain, resume=True, **PLAIN | change)
    if change:
        with pytest.raises(UserError, match="embeddings 'none' -> 'int8'"):
            train(config, recorder()[0])
    else:
        assert train(config, recorder()[0]).steps == 8


def test_changed_rows_are_refused(world, plain, tmp_path):
    folder, _ = world
    config = configure(folder, plain, resume=True, rows=write_rows(tmp_path / "rows.jsonl", 12), **PLAIN)
    with pytest.raises(UserError, match=r"checkpoints/8: the saved place in the data .* have changed: rows"):
        train(config, recorder()[0])


def test_another_model_is_refused(world, plain, tmp_path):
    folder, _ = world
    other = tiny_llama(tmp_path / "model", seed=1)
    with pytest.raises(
        UserError, match=rf"checkpoints/8: was saved with other weights than those that --model {other}"
    ):
        train(tiny_config(other, plain, folder / "rows.jsonl", resume=True, **PLAIN), recorder()[0])


def test_only_checkpoints_of_the_run_are_resumed(world, plain, copy, tmp_path):
    folder, _ = world
    for path in (copy / "checkpoints" / "5", copy / "adapter", plain / "checkpoints" / "3"):
        with pytest.raises(UserError, match=rf"--resume {path}: not a checkpoint of this run; .* are 1, 3, 6, 8"):
            train(configure(folder, copy, resume=path, **PLAIN), recorder()[0])
    config = configure(folder, tmp_path / "new", resume=tmp_path / "new" / "checkpoints" / "3", **PLAIN)
    with pytest.raises(UserError, match="are none"):
        train(config, recorder()[0])
    assert not (tmp_path / "new").exists()


def damage(run, step):
    path = run / "checkpoints" / str(step) / "adapters" / "manifest.ocdbt"
    path.write_bytes(path.read_bytes()[:-1])


def test_a_damaged_checkpoint_is_said_and_the_one_before_is_used(world, plain, copy):
    folder, child = world
    damage(copy, 8)
    finished = child.train(configure(folder, copy, resume=True, **PLAIN))
    message = f"{copy}/checkpoints/8: the checkpoint is damaged (adapters/manifest.ocdbt has not the content that was"
    assert message in finished.printed
    assert "8, going on from 6" in finished.printed
    assert_same_run(copy, plain)


def test_a_damaged_checkpoint_that_was_asked_for_is_refused(world, copy):
    folder, _ = world
    damage(copy, 6)
    config = configure(folder, copy, resume=copy / "checkpoints" / "6", **PLAIN)
    with pytest.raises(UserError, match=r"checkpoints/6: the checkpoint is damaged .* are 1, 3, 6, 8: use another one"):
        train(config, recorder()[0])
    for step in (1, 3, 8):
        damage(copy, step)
    with pytest.raises(UserError, match=r"checkpoints: every checkpoint is damaged: 1, 3, 6, 8"):
        train(configure(folder, copy, resume=True, **PLAIN), recorder()[0])


def test_an_adapter_without_its_checkpoints_is_kept(world, copy):
    folder, _ = world
    shutil.rmtree(copy / "checkpoints")
    before = (copy / "adapter" / "adapter_model.safetensors").read_bytes()
    with pytest.raises(UserError, match=f"--resume: {copy} holds an adapter, but no checkpoint to go on from"):
        train(configure(folder, copy, resume=True, **PLAIN), recorder()[0])
    assert (copy / "adapter" / "adapter_model.safetensors").read_bytes() == before


def test_a_run_whose_metrics_were_removed_goes_on(world, plain, copy):
    folder, _ = world
    shutil.rmtree(copy / "checkpoints" / "8")
    (copy / "metrics.jsonl").unlink()
    options = PLAIN | {"eval_data": [folder / "held_out.jsonl"], "eval_every": 2}
    assert train(configure(folder, copy, resume=True, **options), recorder()[0]).steps == 8
    assert [line["step"] for line in read_metrics(copy / "metrics.jsonl")] == [7, 8]
    name = "adapter/adapter_model.safetensors"
    assert (copy / name).read_bytes() == (plain / name).read_bytes()


def rewrite_progress(run, step, progress):
    """As another version would have: with checksums that are right."""
    state = run / "checkpoints" / str(step)
    (state / "progress.json").write_text(json.dumps(progress))
    manifest = json.loads((state / "manifest.json").read_text())
    manifest["sha256"]["progress.json"] = hashlib.sha256((state / "progress.json").read_bytes()).hexdigest()
    (state / "manifest.json").write_text(json.dumps(manifest))


def test_what_another_version_saved_is_named(world, copy):
    folder, _ = world
    rewrite_progress(copy, 8, {"model": "", "rows": 3})
    with pytest.raises(UserError, match=r"checkpoints/8: progress: expected model, data, .* another version"):
        train(configure(folder, copy, resume=True, **PLAIN), recorder()[0])
