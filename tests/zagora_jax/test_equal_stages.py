"""Equal stages in one program against one device, and against stages with a program each."""

import json
from functools import partial

import eight_devices
import jax
import numpy as np
import oracles
import pytest
import runs
from pipelines import TOLERANCE, alone, batches, furthest, laid_out, make_subject, trained

from models.parameters import by_path
from sharding.balance import StageCost
from sharding.mesh import make_mesh
from zagora_jax import watched_stages
from zagora_jax.arrange import arrange
from zagora_jax.distribution import Distribution
from zagora_jax.equal_stages import EqualStages
from zagora_jax.errors import UserError
from zagora_jax.optimizer import make_optimizer
from zagora_jax.option_groups import BalanceConfig, MeshConfig, OffloadConfig, SamplesConfig
from zagora_jax.pipeline import Balance, Pipeline
from zagora_jax.reporting.report_page import layer_shares
from zagora_jax.run_directory import RunDirectory, read_metrics
from zagora_jax.step import ForwardOptions
from zagora_jax.train_state import initial_state
from zagora_jax.trainer import train
from zagora_jax.watched_stages import WatchedStages

pytestmark = pytest.mark.eight_devices


def test_on_eight_devices() -> None:
    eight_devices.run(__file__)


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    """Four layers; dropout; a vocabulary that no number of stages divides."""
    return make_subject(tmp_path_factory.mktemp("model"), num_hidden_layers=4)


def equal_stages(subject, stages, compression="none", **inside):
    sizes = {"stage": stages, **inside}
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod([*sizes.values()]))])
    return EqualStages(mesh, subject.base.model, compression)


@pytest.mark.slow
def test_replicas_of_stages_train_as_one_device_does(subject):
    expected, one = alone(subject, 4, 3)
    found, state = trained(equal_stages(subject, 4, data=2), subject, batches(4, 3))
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)
    # Adam divides by the gradient's own size: see test_distribution.
    assert furthest(state, one) < 1e-4


@pytest.mark.parametrize("remat", ["none", pytest.param("attention", marks=pytest.mark.slow), "stage"])
def test_what_a_stage_keeps_changes_no_number(subject, remat):
    expected, one = alone(subject, 4, 3)
    found, state = trained(equal_stages(subject, 2), subject, batches(4, 3), remat=remat)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)
    assert furthest(state, one) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "one-row-each"])
def test_twenty_steps(subject, stages, accumulation, packed):
    expected, one = alone(subject, 20, accumulation, packed=packed)
    found, state = trained(equal_stages(subject, stages), subject, batches(20, accumulation, packed), packed=packed)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)
    assert furthest(state, one) < 1e-3  # of the 0.015 that 20 steps may move an element


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "layers"), [(3, 6), (8, 8)])
def test_twenty_steps_through_other_numbers_of_stages(tmp_path, stages, layers):
    subject = make_subject(tmp_path, num_hidden_layers=layers)
    expected, _ = alone(subject, 20, 2)
    found, _ = trained(equal_stages(subject, stages), subject, batches(20, 2))
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [{"fsdp": 2}, {"tensor": 2}, {"data": 2, "fsdp": 2}], ids=str)
def test_stages_of_devices_that_share_their_layers(subject, inside):
    expected, one = alone(subject, 3, 3)
    found, state = trained(equal_stages(subject, 2, **inside), subject, batches(3, 3))
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)
    assert furthest(state, one) < 1e-4


@pytest.mark.slow
def test_an_embedding_that_is_the_head_too(tmp_path):
    subject = make_subject(tmp_path, num_hidden_layers=2, tie_word_embeddings=True)
    expected, _ = alone(subject, 3, 2)
    found, _ = trained(equal_stages(subject, 2), subject, batches(3, 2))
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)


# Gradients rounded to 8 bits: see test_distribution.
@pytest.mark.slow
def test_replicas_exchange_compressed_gradients_as_stages_with_programs_do(subject):
    expected, _ = alone(subject, 20, 2)
    found, state = trained(equal_stages(subject, 2, "int8", data=4), subject, batches(20, 2))
    np.testing.assert_allclose(found[:, 0], expected[:, 0], rtol=5e-3)
    assert found[1, 0] != expected[1, 0]  # something was rounded
    mesh = make_mesh({"stage": 2, "data": 4}, jax.devices())
    programs, other = trained(Pipeline(mesh, subject.base.model, (2, 2), "int8"), subject, batches(20, 2))
    np.testing.assert_allclose(found[:, 0], programs[:, 0], rtol=5e-3)
    for ours, theirs in zip(state.residuals.reduced, other.residuals.reduced, strict=True):
        assert ours.shape == theirs.shape
        assert np.asarray(ours, np.float32).any()


def test_a_state_is_the_same_in_either_form(subject):
    made = make_optimizer("adamw_8bit", 1e-3, 0.0)
    one = equal_stages(subject, 2, "int8", data=2)
    other = Pipeline(one.mesh, subject.base.model, (3, 1), "int8")
    assert one.exchange_state == other.exchange_state
    whole = one.begin(initial_state(subject.adapters, made, "float16"))
    leaves, structure = jax.tree.flatten(whole)
    rng = np.random.default_rng(0)
    drawn = [np.asarray(rng.integers(0, 100, leaf.shape)).astype(leaf.dtype) for leaf in leaves]
    whole = jax.tree.unflatten(structure, drawn)
    for arrangement in (one, other):
        assert jax.tree.structure(arrangement.begin(whole)) == structure
        back = arrangement.whole_state(arrangement.put_state(whole), whole)
        for expected, found in zip(jax.tree.leaves(whole), jax.tree.leaves(back), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_each_layer_goes_to_its_stage_alone(subject):
    """Read a layer at a time, as from a checkpoint, or given whole: the arrays are the same."""
    arrangement = equal_stages(subject, 2, fsdp=2)
    by_layer = by_path(arrangement.load(lambda destination: subject.base.load(destination=destination)))
    whole = by_path(laid_out(arrangement, subject.frozen))
    assert by_layer.keys() == whole.keys()
    for path in whole:
        leaves = (jax.tree.leaves(state[path].get_value()) for state in (whole, by_layer))
        for expected, found in zip(*leaves, strict=True):
            assert found.sharding == expected.sharding
            np.testing.assert_array_equal(found, expected)
    codes = by_layer["model", "layers", "mlp", "down_proj", "weight"].get_value().codes.array
    assert {shard.index[0].indices(4)[:2] for shard in codes.addressable_shards} == {(0, 2), (2, 4)}


def test_a_device_holds_its_share_of_everything_large(subject):
    like = jax.eval_shape(lambda: initial_state(subject.adapters, make_optimizer("adamw", 1e-3, 0), "float32"))
    one = Distribution(make_mesh({}, jax.devices()[:1]), subject.base.model).device_bytes(like)
    layout = equal_stages(subject, 4).layout(like)
    assert layout["layers_of_stages"] == [1, 1, 1, 1]
    for held in layout["bytes_a_device"].values():
        for kind in ("codes", "embeddings", "LoRA", "optimizer"):
            assert held[kind] == pytest.approx(one[kind] / 4, rel=0.01), kind


def test_the_loss_is_that_of_one_device(subject):
    options, batch = ForwardOptions(kernel="reference", remat="full", segmented=True), batches(1, 3)[0]
    found = []
    for arrangement in (Distribution(make_mesh({}, jax.devices()[:1]), subject.base.model), equal_stages(subject, 2)):
        evaluate = arrangement.compile_evaluation(options, batch)
        frozen = laid_out(arrangement, subject.frozen)
        found.append([float(x) for x in evaluate(arrangement.put_adapters(subject.adapters), frozen, batch)])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"stage_layers": [3, 1]}, "--stage-layers are not equal"),
        ({"mesh": MeshConfig(stage=3)}, "4 layers do not go into 3 equal stages"),
        ({"mesh": MeshConfig(stage=1)}, "there is one stage"),
        ({"offload": OffloadConfig(weights=2)}, "--offload.weights has each stage stream its own layers"),
        ({"offload": OffloadConfig(embedding=True)}, "--offload.embedding leaves the embedding to the first stage"),
        (
            {"offload": OffloadConfig(activations=True)},
            "--offload.activations has each stage leave in host memory what remat full keeps",
        ),
    ],
    ids=str,
)
def test_what_is_against_one_program_is_said(subject, tmp_path, options, why):
    given = {"strategy": "layerwise", "mesh": MeshConfig(stage=2), "remat": "full", **options}
    made = partial(runs.tiny_config, tmp_path, tmp_path / "run", tmp_path / "rows.jsonl", **given)
    arrangement = arrange(made(), subject.base.model)
    assert isinstance(arrangement, Pipeline)
    assert arrangement.facts()["layers of each stage"].endswith(f"a program for each: {why}")
    with pytest.raises(UserError, match=f"--stage-form one-jit: {why}; use --stage-form auto or programs"):
        arrange(made(stage_form="one-jit"), subject.base.model)


def test_alike_cards_run_one_program_unless_asked_otherwise(subject, tmp_path, monkeypatch):
    given = {"strategy": "layerwise", "mesh": MeshConfig(stage=2)}
    made = partial(runs.tiny_config, tmp_path, tmp_path / "run", tmp_path / "rows.jsonl", **given)
    movable = "2, 2, in one program as long as no card is slow"
    still = {"balance": BalanceConfig(threshold=0)}
    for options, expected in (
        ({}, movable),
        ({"stage_layers": [2, 2]}, movable),
        ({"stage_form": "one-jit"}, movable),
        (still, "2, 2, in one program; none moves"),
    ):
        arrangement = arrange(made(**options), subject.base.model)
        assert isinstance(arrangement, EqualStages)
        assert arrangement.facts()["layers of each stage"] == expected
    assert isinstance(arrange(made(stage_form="programs"), subject.base.model), Pipeline)
    limits = dict(zip(jax.devices(), (2**34, 2**35, *[None] * 6), strict=True))
    monkeypatch.setattr("zagora_jax.arrange.memory_limit", limits.get)
    cut = arrange(made(), subject.base.model).facts()["layers of each stage"]
    assert cut.endswith("the cards differ: cpu with 16 GiB, cpu with 32 GiB")


class Clock:
    """In place of the time: a step takes a second, but 1.5 from the fourth on."""

    def __init__(self):
        self.calls, self.now = 0, 0.0

    def __call__(self):
        self.calls += 1
        if self.calls % 2 == 0:
            self.now += 1.5 if self.calls > 6 else 1.0
        return self.now


SLOW = [StageCost(2.0), StageCost(1.0)]


@pytest.mark.parametrize(
    ("costs", "layers", "said"),
    [
        (SLOW, [1, 3], "layers moved, and each stage has a program of its own now: steps have become slower and take"),
        pytest.param([StageCost(1.0)] * 2, [2, 2], "which saves too little (0%)", marks=pytest.mark.slow),
    ],
    ids=["a slow card", "all alike"],
)
def test_layers_leave_a_slow_card_and_nothing_else_changes(subject, monkeypatch, costs, layers, said):
    """Steps are slow from the fourth on, and layers move behind the fifth: then stages have programs of their own."""
    expected, one = alone(subject, 6, 3)
    monkeypatch.setattr(watched_stages, "_seconds", Clock())
    monkeypatch.setattr(Pipeline, "measured_costs", lambda *_: costs)
    mesh = make_mesh({"stage": 2, "data": 2}, jax.devices()[:4])
    arrangement = WatchedStages(mesh, subject.base.model, "none", False, Balance(threshold=0.2, patience=2))
    cuts, heard = [], []

    def observe(step):
        now = arrangement.programs or arrangement
        cuts.append(now.layers)

    found, state = trained(arrangement, subject, batches(6, 3), observe=observe, say=heard.append)
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE)
    assert furthest(state, one) < 2e-4
    assert cuts == [[2, 2]] * 4 + [layers] * 2
    assert arrangement.facts()["layers of each stage"].startswith(f"{layers[0]}, {layers[1]}")
    (line,) = heard
    assert said in line


@pytest.mark.slow
def test_what_a_run_says_of_its_layout_follows_its_layers(tmp_path, monkeypatch):
    """Layers move behind the fifth step; samples and evaluations after that come from the stages as they are then."""
    monkeypatch.setattr(watched_stages, "_seconds", Clock())
    monkeypatch.setattr(Pipeline, "measured_costs", lambda *_: SLOW)
    model = oracles.tiny_llama(tmp_path / "model", num_hidden_layers=4)
    rows, prompts = runs.write_rows(tmp_path / "rows.jsonl", 12), ["What is 3?"]

    def run(name, **options):
        samples = SamplesConfig(prompts=prompts, every=6, max_new_tokens=2)
        common = {"eval_data": [rows], "samples": samples, "max_steps": 7}
        train(runs.tiny_config(model, tmp_path / name, rows, **common, **options), runs.recorder()[0])
        return RunDirectory(tmp_path / name)

    balance = BalanceConfig(threshold=0.2, patience=2)
    moved = run("moved", strategy="layerwise", mesh=MeshConfig(stage=2), devices=[0, 1], balance=balance)
    layout = json.loads(moved.layout.read_text())
    assert layout["layers_of_stages"] == [1, 3]
    assert dict(layer_shares(layout)) == {"cpu:0": [1, 0, 0, 0], "cpu:1": [0, 1, 1, 1]}
    assert moved.read_report()["facts"]["layers of each stage"].startswith("1, 3; a program for each")
    lines = read_metrics(moved.metrics)
    assert [line["step"] for line in lines if "moved_layers" in line] == [5]
    one = run("one", devices=[0])
    assert read_metrics(moved.samples) == read_metrics(one.samples)
    losses = (of.read_report()["loss_after"] for of in (moved, one))
    assert next(losses) == pytest.approx(next(losses), rel=TOLERANCE)


@pytest.mark.slow
def test_a_run_goes_on_in_the_other_form(tmp_path):
    """Through the command's own path: checkpoints, resumption in either form and with another strategy, evaluation."""
    model = oracles.tiny_llama(tmp_path / "model", num_hidden_layers=4)
    rows, held_out = runs.write_rows(tmp_path / "rows.jsonl", 24), runs.write_rows(tmp_path / "held.jsonl", 3, first=50)

    def run(name, **options):
        defaults = {"strategy": "layerwise", "eval_data": [held_out], "save_every": 2, "schedule": "constant"}
        defaults["mesh"] = MeshConfig(stage=2, data=2)
        config = runs.tiny_config(model, tmp_path / name, rows, **(defaults | options))
        reporter, printed = runs.recorder()
        return train(config, reporter), printed(), [line | {"idle": 0} for line in runs.numbers(tmp_path / name)]

    whole, printed, expected = run("whole", max_steps=4)
    assert "2, 2, in one program" in printed
    run("parted", max_steps=2)
    assert run("parted", max_steps=4, resume=True)[2] == expected  # the same bits
    run("mixed", max_steps=2)
    result, _, found = run("mixed", max_steps=4, resume=True, stage_layers=[3, 1])
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([line[name] for line in found], [line[name] for line in expected], rtol=TOLERANCE)
    assert result.loss_after == pytest.approx(whole.loss_after, rel=TOLERANCE)
    one = run("mixed", max_steps=5, resume=True, strategy="replicas", mesh=MeshConfig(data=2))[0]
    again = run("whole", max_steps=5, resume=True)[0]
    assert one.loss_after == pytest.approx(again.loss_after, rel=TOLERANCE)
