"""A step through the stages of a pipeline against the same step on one device, and what each stage holds."""

import json
from functools import partial
from types import SimpleNamespace

import eight_devices
import jax
import numpy as np
import oracles
import pytest
import runs
from pipelines import TOLERANCE, alone, batches, furthest, laid_out, make_subject, trained

from models.lora import initial_adapter
from models.parameters import split
from models.stream_order import stream_order
from sharding.balance import Move, StageCost
from sharding.mesh import make_mesh
from zagora_jax import pipeline as pipeline_module
from zagora_jax import pipeline_step
from zagora_jax.kept_layers import KeptLayers
from zagora_jax.moving_streams import streamed_after
from zagora_jax.optimizer import make_optimizer
from zagora_jax.option_groups import MeshConfig, OffloadConfig
from zagora_jax.pipeline import Balance, Pipeline
from zagora_jax.stage_programs import PipelineState
from zagora_jax.step import ForwardOptions
from zagora_jax.train_state import initial_state
from zagora_jax.trainer import train

pytestmark = pytest.mark.eight_devices


def test_on_eight_devices() -> None:
    eight_devices.run(__file__)


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    """Five layers, which no number of stages but one and five divides; dropout."""
    return make_subject(tmp_path_factory.mktemp("model"), num_hidden_layers=5)


def pipeline(subject, layers, data=1, compression="none", **options):
    mesh = make_mesh({"stage": len(layers), "data": data}, jax.devices()[: len(layers) * data])
    return Pipeline(mesh, subject.base.model, layers, compression, **options)


def test_stages_train_as_one_device_does(subject):
    expected, one = alone(subject, 6, 3)
    arrangement = pipeline(subject, (1, 3, 1), 2, host_embedding=True)
    found, state = trained(arrangement, subject, batches(6, 3))
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)
    # Adam divides by the gradient's own size: see test_distribution.
    assert furthest(state, one) < 1e-4


@pytest.mark.parametrize(
    ("remat", "offload"),
    [
        ("full", True),
        ("stage", False),
        pytest.param("none", False, marks=pytest.mark.slow),
        pytest.param("none", True, marks=pytest.mark.slow),
    ],
)
def test_what_a_stage_keeps_changes_no_number(subject, remat, offload):
    expected, one = alone(subject, 4, 3)
    found, state = trained(pipeline(subject, (3, 2)), subject, batches(4, 3), remat=remat, offload=offload)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)
    assert furthest(state, one) < 1e-4


@pytest.mark.parametrize("offload", [False, True])
def test_a_stage_keeps_its_layers_inputs_where_it_is_told_and_no_weights(subject, offload):
    stage, (batch,) = pipeline(subject, (3, 2)).stages[0], batches(1, 3)
    options = ForwardOptions("reference", "full", segmented=True, offload_activations=offload)
    kept = KeptLayers.of(stage, options, 0, batch)
    activation = stage.abstract_activation(batch)
    (inputs,) = [array for array in kept.arrays if array.shape == (1, 3, *activation.shape)]
    assert inputs.sharding.memory_kind == ("pinned_host" if offload else "device")
    # Beside it: codebooks, positions' rotations, segments, keys and numbers of layers.
    others = sum(np.prod(array.shape) for array in kept.arrays if array is not inputs)
    assert others < np.prod(activation.shape)


@pytest.mark.parametrize(
    ("weights", "inside", "offload"),
    [
        ("all", {}, True),
        pytest.param("all", {"data": 2}, False, marks=pytest.mark.slow),
        pytest.param(3, {}, True, marks=pytest.mark.slow),
        pytest.param(4, {"fsdp": 2}, True, marks=pytest.mark.slow),
    ],
)
def test_stages_stream_their_own_layers(subject, weights, inside, offload):
    """The optimizer's moments wait in host memory too."""
    expected, one = alone(subject, 6, 3)
    sizes = {"stage": 2, **inside}
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod([*sizes.values()]))])
    arrangement = Pipeline(mesh, subject.base.model, (3, 2), weights=weights, moments_on_host=True)
    found, state = trained(arrangement, subject, batches(6, 3), offload=offload)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)
    assert furthest(state, one) < 1e-4


def test_auto_fills_what_the_streaming_programs_leave_of_each_card(subject, monkeypatch):
    """The first card has room for nothing more than the program, the second for all its layers."""
    arrangement = pipeline(subject, (4, 1), weights="auto")
    assert "4, 1; of them in host memory: as the devices need" in arrangement.facts()["layers of each stage"]
    program = SimpleNamespace(planned_memory=lambda inputs, travelling: 2**20)
    monkeypatch.setattr(pipeline_module, "StagePrograms", lambda *_: program)
    first = jax.devices()[0]
    monkeypatch.setattr(pipeline_module, "memory_limit", lambda device: 2**20 if device == first else 2**30)
    whole = initial_state(subject.adapters, make_optimizer("adamw", 1e-3, 0.0), "float32")
    said = []
    arrangement._settle(SimpleNamespace(), whole, batches(1, 3)[0], said.append)
    assert said == ["weights: 4 of 4, 0 of 1 layers of the stages wait in host memory"]
    assert [stage.distribution.stream for stage in arrangement.stages] == [stream_order(4, 4), None]
    assert "4, 1; of them in host memory: 4, 0; a program for each" in arrangement.facts()["layers of each stage"]


def test_one_stage_has_all_layers_and_is_not_measured(subject):
    arrangement = Pipeline(make_mesh({"stage": 1}, jax.devices()[:1]), subject.base.model)
    assert not arrangement.measures
    assert arrangement.facts()["layers of each stage"].startswith("5; a program for each")


@pytest.mark.slow
def test_streaming_replicas_of_a_pipeline_compress_as_resident_ones_do(subject):
    resident, streamed = (
        trained(pipeline(subject, (3, 2), 2, "int8", weights=weights), subject, batches(3, 3), offload=True)
        for weights in ("none", "all")
    )
    np.testing.assert_allclose(streamed[0], resident[0], rtol=TOLERANCE)
    assert any(np.asarray(residual, np.float32).any() for residual in jax.tree.leaves(streamed[1].residuals))


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("layers", [(3, 2), (1, 3, 1), (1, 1, 2, 1)], ids=str)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "one-row-each"])
def test_twenty_steps(subject, layers, accumulation, packed):
    expected, one = alone(subject, 20, accumulation, packed=packed)
    found, state = trained(pipeline(subject, layers), subject, batches(20, accumulation, packed), packed=packed)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)
    assert furthest(state, one) < 1e-3  # of the 0.015 that 20 steps may move an element


@pytest.mark.slow
def test_twenty_steps_through_eight_stages(tmp_path):
    subject = make_subject(tmp_path, num_hidden_layers=9)
    expected, _ = alone(subject, 20, 2)
    found, _ = trained(pipeline(subject, (1, 1, 1, 2, 1, 1, 1, 1)), subject, batches(20, 2))
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)


GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9, "attn_logit_softcapping": 2.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantization", "model", "config"),
    [("hqq", "llama", {}), ("int8", "gemma2", GEMMA), ("none", "gemma3_text", {"head_dim": 16, "sliding_window": 9})],
)
def test_every_format_and_family(tmp_path, quantization, model, config):
    subject = make_subject(tmp_path, quantization, model, num_hidden_layers=3, **config)
    expected, one = alone(subject, 3, 2)
    found, state = trained(pipeline(subject, (1, 2)), subject, batches(3, 2))
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)
    assert furthest(state, one) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("host_embedding", [False, True], ids=["on the card", "on the host"])
@pytest.mark.parametrize("stages", [1, 2])
def test_an_embedding_that_is_the_head_too(tmp_path, stages, host_embedding):
    subject = make_subject(tmp_path, num_hidden_layers=2, tie_word_embeddings=True)
    expected, _ = alone(subject, 3, 2)
    arrangement = pipeline(subject, (2,) if stages == 1 else (1, 1), host_embedding=host_embedding)
    found, _ = trained(arrangement, subject, batches(3, 2))
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [{"fsdp": 2}, {"tensor": 2}], ids=str)
def test_stages_of_devices_that_share_their_layers(subject, inside):
    expected, one = alone(subject, 3, 3)
    mesh = make_mesh({"stage": 2, **inside}, jax.devices()[:4])
    found, state = trained(Pipeline(mesh, subject.base.model, (3, 2)), subject, batches(3, 3))
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)
    assert furthest(state, one) < 1e-4


# Gradients rounded to 8 bits: see test_distribution.
@pytest.mark.slow
def test_replicas_of_a_pipeline_exchange_compressed_gradients(subject):
    expected, _ = alone(subject, 20, 2)
    found, state = trained(pipeline(subject, (3, 2), 4, "int8"), subject, batches(20, 2))
    np.testing.assert_allclose(found[:, 0], expected[:, 0], rtol=5e-3)
    assert found[1, 0] != expected[1, 0]  # something was rounded
    residuals = jax.tree.leaves(state.residuals)
    assert len(residuals) == 2
    assert all(np.asarray(residual, np.float32).any() for residual in residuals)


def test_a_state_does_not_depend_on_the_cut(subject):
    """Nor do residuals of compressed exchanges, which lie otherwise in every stage."""
    made = make_optimizer("adamw_8bit", 1e-3, 0.0)
    one, other = (pipeline(subject, layers, 2, "int8") for layers in [(3, 2), (1, 4)])
    whole = one.begin(initial_state(subject.adapters, made, "float16"))
    leaves, structure = jax.tree.flatten(whole)
    rng = np.random.default_rng(0)
    drawn = [np.asarray(rng.integers(0, 100, leaf.shape)).astype(leaf.dtype) for leaf in leaves]
    whole = jax.tree.unflatten(structure, drawn)
    for arrangement in (one, other):
        back = arrangement.whole_state(arrangement.put_state(whole), whole)
        for expected, found in zip(jax.tree.leaves(whole), jax.tree.leaves(back), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_a_stage_holds_its_own_layers_and_nothing_else(subject):
    """Of one and two layers of nine, the bytes are as 1 to 2; embedding and head are at the ends."""
    model = subject.base.model.part(9, subject.base.model.ends)
    mesh = make_mesh({"stage": 4}, jax.devices()[:4])
    arrangement = Pipeline(mesh, model, (3, 1, 2, 3))
    like = jax.eval_shape(
        lambda: initial_state(initial_adapter(split(model)[2], 0), make_optimizer("adamw", 1e-3, 0), "float32")
    )
    held = list(arrangement.layout(like)["bytes_a_device"].values())
    assert [kinds["embeddings"] > 0 for kinds in held] == [True, False, False, True]
    one, two = (sum(kinds.values()) for kinds in held[1:3])
    assert two / one == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize(("layers", "found"), [((2, 2), "2, 2"), ((5, 0), "5, 0"), ((1, 2, 2), "1, 2, 2")])
def test_a_cut_that_is_none_is_refused(subject, layers, found):
    mesh = make_mesh({"stage": 2}, jax.devices()[:2])
    with pytest.raises(ValueError, match=f"expected 2 numbers of layers, none below 1, that sum to 5; found {found}"):
        Pipeline(mesh, subject.base.model, layers)


class Clock:
    """In place of measured times: a layer takes a second, but in a stage that a test slows down."""

    def __init__(self, monkeypatch):
        self.slowness: dict[int, float] = {}
        self.layer_seconds = 1.0
        monkeypatch.setattr(pipeline_step, "seconds_of", self.seconds_of)

    def seconds_of(self, work, layers):
        assert all(of_stage.seconds > 0 and of_stage.tasks["backward"] == 3 for of_stage in work)
        return [count * self.layer_seconds * self.slowness.get(stage, 1.0) for stage, count in enumerate(layers)]


def test_layers_leave_a_slow_card_and_nothing_else_changes(subject, monkeypatch):
    """From the third step on, the card of stage 0 is slow; its layers go to stage 1 behind the fourth step."""
    expected, one = alone(subject, 6, 3)
    clock = Clock(monkeypatch)
    said, cuts = [], []
    arrangement = pipeline(subject, (3, 2), 2, balance=Balance(threshold=0.3, patience=2))

    def observe(step):
        cuts.append(arrangement.layers)
        if len(cuts) == 2:
            clock.slowness[0] = 4.0

    found, state = trained(arrangement, subject, batches(6, 3), observe=observe, say=said.append)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)
    assert furthest(state, one) < 2e-4
    assert cuts == [[3, 2]] * 3 + [[1, 4]] * 3
    (line,) = said
    assert line.startswith(
        "moved 2 layers: stage 0 takes 1.2e+04 ms a micro-batch with 3 layers, and the slowest stage would take 4e+03 "
        "ms with 1, 4. It took "
    )
    assert line.endswith("should save 2.4e+04 ms a step (67%)")


@pytest.mark.parametrize(
    ("weights", "inside", "streamed"),
    [
        (2, {}, [0, 3]),
        pytest.param("all", {}, [1, 4], marks=pytest.mark.slow),
        pytest.param(3, {"fsdp": 2}, [0, 4], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_streamed_layers_move_as_if_they_had_been_loaded_there(subject, weights, inside, streamed):
    """Three and two layers become one and four; as many as before stay on the devices."""
    mesh = make_mesh({"stage": 2, **inside}, jax.devices()[: 2 * inside.get("fsdp", 1)])
    arrangement, fresh = (Pipeline(mesh, subject.base.model, layers, weights=weights) for layers in ((3, 2), (1, 4)))
    assert streamed_after(arrangement.stages, [1, 4]) == streamed
    frozen = laid_out(arrangement, subject.frozen)
    state = PipelineState((initial_state(subject.adapters, make_optimizer("adamw", 1e-3, 0.0), "float32"),) * 2)
    state = arrangement.put_state(arrangement.begin(state.stages[0]))
    arrangement.move(arrangement.recut([1, 4]), state, frozen)
    assert arrangement.layers == [1, 4]
    fresh.stages = fresh.cut([1, 4], streamed)
    expected = laid_out(fresh, subject.frozen)
    assert jax.tree.structure(frozen.parameters) == jax.tree.structure(expected.parameters)
    for ours, theirs in zip(jax.tree.leaves(frozen), jax.tree.leaves(expected), strict=True):
        assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)
        assert ours.sharding.memory_kind == theirs.sharding.memory_kind
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["all", 3])
def test_streamed_layers_leave_a_slow_card(subject, monkeypatch, weights):
    """There and back: the third cut is the first one, whose programs are there already."""
    expected, one = alone(subject, 6, 3)
    clock, cuts, said = Clock(monkeypatch), [], []
    clock.layer_seconds = 1e6  # so that two steps make up for a move, however long programs take to compile here
    options = {"balance": Balance(threshold=0.3, patience=1), "weights": weights, "moments_on_host": True}
    arrangement = pipeline(subject, (3, 2), **options)

    def observe(step):
        cuts.append(arrangement.layers)
        clock.slowness = {0: 4.0} if len(cuts) == 1 else {1: 4.0} if len(cuts) == 3 else {}

    found, state = trained(arrangement, subject, batches(6, 3), observe=observe, say=said.append, offload=True)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)
    assert furthest(state, one) < 2e-4
    assert cuts == [[3, 2], [1, 4], [1, 4], [4, 1], [4, 1], [4, 1]]
    there, back = said
    assert there.startswith("moved 2 layers: stage 0 takes")
    assert back.startswith("moved 3 layers: stage 1 takes")


@pytest.mark.slow
def test_residuals_move_with_their_layers(subject, monkeypatch):
    """What is rounded off differs with the cut, so that losses agree as far as compressed ones do."""
    still, _ = trained(pipeline(subject, (3, 2), 2, "int8"), subject, batches(6, 3))
    clock = Clock(monkeypatch)
    clock.slowness[0] = 4.0
    arrangement = pipeline(subject, (3, 2), 2, "int8", balance=Balance(threshold=0.3, patience=2))
    moved, state = trained(arrangement, subject, batches(6, 3))
    assert arrangement.layers == [1, 4]
    np.testing.assert_array_equal(moved[:2], still[:2])
    np.testing.assert_allclose(moved[2:, 0], still[2:, 0], rtol=5e-3)
    sent, owned = (np.asarray(leaf, np.float32) for leaf in state.residuals.reduced)
    assert sent.any(axis=(0, 2)).all()  # in every layer
    assert owned.any(axis=1).all()


@pytest.mark.slow
def test_a_run_goes_on_with_another_cut(tmp_path):
    """Through the command's own path: measured cut, checkpoints, resumption, evaluation, adapter."""
    model = oracles.tiny_llama(tmp_path / "model", num_hidden_layers=5)
    rows, held_out = runs.write_rows(tmp_path / "rows.jsonl", 24), runs.write_rows(tmp_path / "held.jsonl", 3, first=50)

    def run(name, **options):
        defaults = {"strategy": "layerwise", "eval_data": [held_out], "save_every": 2, "schedule": "constant"}
        defaults["mesh"] = MeshConfig(stage=2, data=2)
        config = runs.tiny_config(model, tmp_path / name, rows, **(defaults | options))
        reporter, printed = runs.recorder()
        return train(config, reporter), printed(), runs.numbers(tmp_path / name)

    whole, printed, expected = run("whole", max_steps=4)
    assert "A micro-batch takes stage 0: " in printed
    run("parted", max_steps=2, stage_layers=[3, 2])
    result, _, found = run("parted", max_steps=4, stage_layers=[3, 2], resume=True)
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([line[name] for line in found], [line[name] for line in expected], rtol=TOLERANCE)
    assert result.loss_after == pytest.approx(whole.loss_after, rel=TOLERANCE)

    once, _, in_one_go = run("once", max_steps=4, stage_layers=[3, 2])
    assert [line | {"idle": 0} for line in in_one_go] == [line | {"idle": 0} for line in found]  # the same bits
    assert once.loss_after == result.loss_after
    alone, _, _ = run("parted", max_steps=5, resume=True, strategy="replicas", mesh=MeshConfig(data=2))
    assert alone.loss_after < result.loss_after


@pytest.mark.slow
def test_a_streaming_run_goes_on(tmp_path):
    """Saved with streamed layers and moments on the host, it goes on, also without."""
    model = oracles.tiny_llama(tmp_path / "model", num_hidden_layers=5)
    rows, held_out = runs.write_rows(tmp_path / "rows.jsonl", 24), runs.write_rows(tmp_path / "held.jsonl", 3, first=50)

    def run(name, steps, **options):
        offload = OffloadConfig(weights="all", activations=True, optimizer=True)
        defaults = {"strategy": "layerwise", "remat": "full", "offload": offload, "mesh": MeshConfig(stage=2)}
        defaults |= {"eval_data": [held_out], "save_every": 2, "schedule": "constant", "max_steps": steps}
        config = runs.tiny_config(model, tmp_path / name, rows, **(defaults | {"stage_layers": [3, 2]} | options))
        reporter, printed = runs.recorder()
        return train(config, reporter), printed(), [line | {"idle": 0} for line in runs.numbers(tmp_path / name)]

    _, printed, expected = run("whole", 4)
    assert "3, 2; of them in host memory: 3, 2; a program for each" in printed
    layout = json.loads((tmp_path / "whole" / "layout.json").read_text())["host_bytes_a_device"]
    assert all(kinds["layers"] > 0 and kinds["optimizer"] > 0 for kinds in layout.values())
    run("parted", 2)
    assert run("parted", 4, resume=True)[2] == expected  # the same bits
    resident = run("parted", 5, resume=True, offload=OffloadConfig())[0]
    streamed = run("whole", 5, resume=True)[0]
    assert resident.loss_after == pytest.approx(streamed.loss_after, rel=TOLERANCE)


def test_a_move_that_the_rest_of_the_run_does_not_make_up_for_is_refused_once(subject):
    """It would save 2 / 3 of 12 s x 3 micro-batches, in each of 6 steps."""
    said = []
    step = SimpleNamespace(
        pipeline=pipeline(subject, (3, 2)),
        _batch=batches(6, 3)[0],
        _recipe=SimpleNamespace(total_steps=6),
        _move_seconds=145.0,
        _refused=[],
        _say=said.append,
    )
    step._refuse = partial(pipeline_step.PipelineStep._refuse, step)
    state = PipelineState((initial_state(subject.adapters, make_optimizer("adamw", 1e-3, 0.0), "float32"),) * 2)
    move = Move([1, 4], [StageCost(4.0), StageCost(1.0)], gain=2 / 3)
    for _ in range(2):
        assert pipeline_step.PipelineStep._move(step, move, state, subject.frozen, [12.0, 2.0]) is state
    (line,) = said
    assert line.startswith("no layers moved: stage 0 takes 1.2e+04 ms a micro-batch with 3 layers")
    assert line.endswith("6 steps do not make up for a move of 145.0 s")
