"""The search, by estimates alone: what it takes first, what it keeps fixed, and what it proposes where nothing fits."""

import functools
import itertools

import pytest

import zagora_jax.planning.search
from zagora_jax.arrange import check_ends, ends_trained
from zagora_jax.base import open_base
from zagora_jax.commands import ConfigureConfig
from zagora_jax.errors import UserError
from zagora_jax.layer_ring import LEAST_SLOTS
from zagora_jax.option_groups import LoraConfig
from zagora_jax.planning.candidates import Candidate, candidates, train_config
from zagora_jax.planning.evaluate import Evaluator
from zagora_jax.planning.machine import Budget, Machine, find_machine
from zagora_jax.planning.model import find_model
from zagora_jax.planning.search import SEQUENCE_MULTIPLE, choose
from zagora_jax.planning.shapes import Shapes


def search(**options):
    config = ConfigureConfig(**{"gpu": "rtx4090", "interconnect": "pcie", **options})
    evaluator = Evaluator(find_model(config), find_machine(config), "analytic", print)
    return choose(config, evaluator), evaluator


@functools.cache
def four_cards():
    return search(model_size="70B", gpu_count=4, host_memory=512)


def test_the_fastest_that_fits_is_chosen():
    choice, evaluator = four_cards()
    limit = evaluator.machine.budget.limit
    assert choice.fits
    assert choice.chosen.candidate.strategy == "fsdp"  # 36 GB of weights fit on no single card of 24 GB
    assert choice.chosen.highest_peak <= limit
    everything = candidates(
        ConfigureConfig(model_size="70B"), 4, "synthetic:llama-3.3-70b", evaluator.model.base.model.config
    )
    for candidate in everything:
        other = evaluator.estimate(candidate)
        if other.highest_peak <= limit and candidate.strategy not in ("streaming", "streamed-fsdp"):
            assert other.tokens_per_second < 1.02 * choice.chosen.tokens_per_second


def test_with_tables_trained_in_full_nothing_is_proposed_that_train_refuses():
    lora = LoraConfig(modules_to_save=["embed_tokens", "lm_head"])
    choice, evaluator = search(model_size="8B", gpu_count=4, lora=lora)
    chosen = choice.chosen.candidate
    assert choice.chosen.memory.lora > 4 * 2 * 128256 * 4096 / 4  # float32, cut over four cards
    assert choice.chosen.memory.optimizer > 2 * 4 * 2 * 128256 * 4096 / 4
    ends = ends_trained(evaluator.model.base.model)
    assert set(ends) == {"model.embed_tokens", "lm_head"}
    for candidate in (chosen, *(other.candidate for other in choice.alternatives)):
        check_ends(candidate.config, ends)
    with pytest.raises(UserError, match="--strategy layerwise does not go with training lm_head"):
        search(model_size="8B", gpu_count=4, lora=lora, strategy="layerwise")


def test_alternatives_fit_differ_in_kind_and_go_from_fast_to_slow():
    choice, evaluator = four_cards()
    kinds = [evaluated.candidate.kind for evaluated in (choice.chosen, *choice.alternatives)]
    assert len(set(kinds)) == len(kinds) > 3
    speeds = [evaluated.tokens_per_second for evaluated in (choice.chosen, *choice.alternatives)]
    assert all(later < 1.02 * earlier for earlier, later in itertools.pairwise(speeds))
    assert all(evaluated.highest_peak <= evaluator.machine.budget.limit for evaluated in choice.alternatives)


def test_the_bounds_are_the_last_that_fit():
    choice, evaluator = search(model_size="70B", gpu_count=4)  # of the cards: nobody said what the host has
    limit = evaluator.machine.budget.limit
    longest = choice.longest_sequence
    assert longest.value > 8192
    assert longest.by.candidate.config.sequence_length == longest.value
    assert longest.by.highest_peak <= limit
    longer = longest.by.candidate.changed(sequence_length=longest.value + SEQUENCE_MULTIPLE)
    assert evaluator.estimate(longer).highest_peak > limit
    most = choice.largest_micro_batch
    assert most.by.highest_peak <= limit
    assert evaluator.estimate(choice.chosen.candidate.changed(micro_batch_size=most.value + 1)).highest_peak > limit


def test_no_bound_is_below_what_was_chosen(monkeypatch):
    # As where the chosen program fits, and the estimate alone would not say so for certain.
    monkeypatch.setattr(zagora_jax.planning.search, "_largest", lambda *_: None)
    choice, _ = search(model_size="8B", micro_batch_size=2, sequence_length=4096, host_memory=64)
    assert choice.longest_sequence.value == 4096
    assert choice.largest_micro_batch.value == 2


def test_a_host_with_little_memory_gets_a_plan_that_offloads_nothing():
    assert four_cards()[0].chosen.candidate.config.offload.activations
    choice, _ = search(model_size="70B", gpu_count=4, host_memory=16)
    assert choice.fits
    assert not choice.chosen.candidate.config.offload.activations


def test_what_waits_in_host_memory_is_the_last_resort_where_nobody_said_how_much_there_is():
    one_card = {"gpu_count": 1, "interconnect": None}
    small, evaluator = search(model_size="8B", **one_card)
    assert small.fits
    assert evaluator.host(small.chosen).pinned == 0
    large, evaluator = search(model_size="70B", **one_card)
    assert large.fits
    assert evaluator.host(large.chosen).pinned > 0


def test_given_options_are_kept():
    choice, _ = search(model_size="8B", micro_batch_size=2, optimizer="adamw_8bit", remat="full", rows_per_step=6)
    config = choice.chosen.candidate.config
    assert (config.micro_batch_size, config.optimizer, config.remat) == (2, "adamw_8bit", "full")
    assert config.gradient_accumulation_steps == 3
    choice, _ = search(model_size="8B", gpu_count=4, strategy="replicas")
    assert choice.chosen.candidate.config.mesh.data == 4


def test_small_models_are_replicated_and_large_ones_are_shared():
    # On a slow link, a model that fits on each card needs no weights from the others.
    small, _ = search(model_size="1B", gpu_count=4, interconnect="pcie3-x4")
    assert small.chosen.candidate.strategy == "replicas"


ONE_CARD = {"gpu": None, "interconnect": None, "memory_per_gpu": 24, "gpu_count": 1}


@pytest.mark.parametrize(("size", "host", "rows"), [("70B", 64, 8), ("123B", 128, 8), ("70B", 128, 16)])
def test_one_small_card_streams_a_large_model(size, host, rows):
    choice, evaluator = search(model_size=size, host_memory=host, **ONE_CARD)
    config = choice.chosen.candidate.config
    assert choice.fits
    assert choice.chosen.candidate.strategy == "streaming"
    assert config.strategy == "streaming"
    assert config.offload.weights != "none"
    assert evaluator.host(choice.chosen).memory <= host * 2**30
    assert config.micro_batch_size * config.gradient_accumulation_steps >= rows


def test_fewer_layers_are_streamed_where_the_card_has_room():
    small, _ = search(model_size="70B", host_memory=128, **ONE_CARD)
    large, _ = search(model_size="70B", host_memory=128, gpu="a6000", strategy="streaming")
    streamed = [choice.chosen.candidate.config.offload.weights for choice in (small, large)]
    assert streamed[1] < (80 if streamed[0] == "all" else streamed[0])


def test_the_smallest_card_holds_the_embeddings_in_fewer_bits_where_nothing_fits_without():
    tight = {"model_size": "8B", "gpu": "rtx3060ti", "offload": {"weights": "none"}}
    plain, _ = search(**tight, sequence_length=1024)
    assert plain.chosen.candidate.config.embeddings == "none"
    less, evaluator = search(**tight, sequence_length=4096)
    config = less.chosen.candidate.config
    assert less.fits
    assert config.embeddings == "int8"
    assert "embeddings int8" in str(less.chosen.candidate)
    # Two tables of 128,256 x 4,096: 2 bytes a number, or 8.25 bits.
    saved = evaluator.estimate(less.chosen.candidate.changed(embeddings="none")).memory.weights
    assert saved - less.chosen.memory.weights == 2 * 128256 * 4096 * (16 - 8.25) / 8
    assert search(**tight, sequence_length=4096, embeddings="nf4")[0].chosen.candidate.config.embeddings == "nf4"


def test_stages_stream_their_own_layers():
    slow = {"model_size": "70B", "gpu": "rtx3060", "gpu_count": 4, "interconnect": "pcie3-x4", "host_memory": 96}
    choice, evaluator = search(**slow, strategy="streamed-layerwise")
    config = choice.chosen.candidate.config
    assert choice.fits
    assert (config.strategy, config.mesh.stage) == ("layerwise", 4)
    assert config.offload.weights != "none"
    assert len(choice.chosen.stages) == 4
    assert all(stage.waiting > 0 for stage in choice.chosen.stages)
    assert evaluator.host(choice.chosen).pinned > sum(stage.waiting for stage in choice.chosen.stages)


def test_pipelines_side_by_side_are_tried():
    choice, _ = search(model_size="8B", gpu_count=4, strategy="replicated-layerwise")
    assert (choice.chosen.candidate.config.mesh.data, choice.chosen.candidate.config.mesh.stage) == (2, 2)


def test_moments_wait_on_the_host_where_that_is_asked_for():
    here, _ = search(model_size="8B", optimizer="adamw", remat="full", micro_batch_size=1)
    there, evaluator = search(
        model_size="8B", optimizer="adamw", remat="full", micro_batch_size=1, offload={"optimizer": True}
    )
    assert there.chosen.candidate.config.offload.optimizer
    assert not here.chosen.candidate.config.offload.optimizer
    moments = 8 * evaluator.model.base.model.config.num_layers * evaluator._shapes.layer_adapter_elements
    assert here.chosen.memory.optimizer - there.chosen.memory.optimizer == pytest.approx(moments, rel=0.01)
    assert evaluator.host(there.chosen).pinned >= moments
    assert there.chosen.time.waiting > here.chosen.time.waiting


def test_layers_come_from_the_disk_where_host_memory_has_no_room_for_them():
    choice, evaluator = search(model_size="70B", host_memory=20, optimizer="adamw_8bit", **ONE_CARD)
    slots = choice.chosen.candidate.config.offload.weights_from
    assert choice.fits
    assert f"streamed from the disk through room for {slots}" in str(choice.chosen.candidate)
    assert LEAST_SLOTS <= slots < 80
    # One more layer has no room.
    assert evaluator.host(choice.chosen).memory <= 20 * 2**30
    more = evaluator.estimate(choice.chosen.candidate.changed(offload__weights_from=slots + 1))
    assert evaluator.host(more).memory > 20 * 2**30


def test_what_is_given_about_offloading_is_kept():
    choice, _ = search(model_size="70B", host_memory=128, **ONE_CARD, offload={"weights": 70, "activations": True})
    config = choice.chosen.candidate.config
    assert (config.offload.weights, config.offload.activations, config.remat) == (70, True, "full")
    choice, _ = search(model_size="70B", host_memory=128, **ONE_CARD, offload={"weights": "none"})
    assert not choice.fits
    assert ("without --offload.weights none",) in choice.changes
    choice, _ = search(model_size="70B", gpu_count=4, offload={"activations": False})
    assert not choice.chosen.candidate.config.offload.activations


def test_rows_that_were_asked_for_are_not_made_fewer():
    choice, _ = search(model_size="70B", host_memory=32, rows_per_step=16, optimizer="adamw_8bit", **ONE_CARD)
    assert not choice.fits
    assert ("without --rows-per-step 16",) in choice.changes
    assert any(change[0].startswith("--host-memory") for change in choice.changes)


def test_a_host_that_holds_nothing_is_named():
    choice, _ = search(model_size="70B", host_memory=7, **ONE_CARD)
    assert not choice.fits
    (more,) = (change[0] for change in choice.changes if change[0].startswith("--host-memory"))
    assert search(**{"model_size": "70B", **ONE_CARD, "host_memory": int(more.split()[1])})[0].fits


def test_layers_are_cut_over_as_many_cards_as_there_are_key_value_heads():
    kinds = {
        candidate.settings.get("mesh.tensor", 1)
        for candidate in candidates(
            ConfigureConfig(model_size="70B"), 16, "synthetic:llama-3.3-70b", find_model_shapes("70B")
        )
    }
    assert kinds == {1, 2, 4, 8}
    choice, _ = search(model_size="70B", gpu_count=4, gpu="h100", interconnect="nvlink", strategy="tensor")
    assert choice.chosen.candidate.config.mesh.tensor == 4


def find_model_shapes(size):
    return find_model(ConfigureConfig(model_size=size)).base.model.config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"remat": "none", "strategy": "streaming"},
            "--strategy streaming --remat none: do not go together for 1 device",
        ),
        ({"remat": "nested", "offload": {"activations": True}}, "--remat nested --offload.activations true: do not go"),
        ({"offload": {"weights": 99}}, "--offload.weights 99: the model has 16 layers"),
        ({"strategy": "layerwise", "gpu_count": 64}, "--strategy layerwise: does not go with 64 devices and 16 layers"),
        ({"strategy": "tensor", "gpu_count": 16}, "--strategy tensor: does not go with 16 devices and 8 key/value"),
        (
            {"strategy": "fdsp", "gpu_count": 2},
            "--strategy fdsp: not known; the nearest is fsdp; all: one-device, fsdp",
        ),
        ({"strategy": "replicas"}, "--strategy replicas: does not go with 1 device; what does: one-device"),
        ({"remat": "most"}, r"--remat most: not known; (the nearest is \w+; )?all: auto, full, attention, mlp, none"),
    ],
)
def test_options_that_leave_nothing_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        search(model_size="1B", **options)


def test_where_nothing_fits_each_single_change_would_do():
    options = {"model_size": "8B", "gpu": "rtx3060ti", "sequence_length": 4096, "offload": {"weights": "none"}}
    options["embeddings"] = "none"
    choice, _ = search(**options)
    assert not choice.fits
    assert not choice.alternatives
    assert all(len(change) == 1 for change in choice.changes)
    texts = [change[0] for change in choice.changes]
    assert {text.split()[0] for text in texts} >= {"--gpu-count", "--gpu"}
    for text in texts:
        if text.startswith("without"):
            continue
        option, value = text.split()
        changed = {
            "--sequence-length": ("sequence_length", int),
            "--gpu-count": ("gpu_count", int),
            "--gpu": ("gpu", str),
        }
        name, kind = changed.get(option, ("lora", lambda rank: LoraConfig(rank=int(rank))))
        assert search(**options | {name: kind(value)})[0].fits, text


def test_what_was_held_fast_is_let_go_first():
    choice, _ = search(model_size="8B", remat="none", sequence_length=8192, offload={"activations": False})
    assert not choice.fits
    assert ("without --remat none",) in choice.changes


def test_two_changes_where_one_is_not_enough():
    # 209 GB of packed weights: neither 16 cards of 8 GB nor one of 141 GB hold them, nor the host four layers of them.
    choice, _ = search(model_size="llama-3.1-405b", gpu="rtx3060ti", optimizer="adamw_8bit", host_memory=12)
    assert not choice.fits
    assert [change.split()[0] for change in choice.changes[0]] == ["--gpu-count", "--gpu"]


def test_stages_have_a_program_each_where_one_for_all_has_no_room(monkeypatch):
    """As training does: equal stages keep more between the passes, and that grows with the sequence."""
    config = ConfigureConfig(gpu="rtx3060", interconnect="pcie", model="synthetic:llama-2-70b", gpu_count=8)
    evaluator = Evaluator(find_model(config), find_machine(config), "analytic", print)
    settings = {
        "strategy": "layerwise",
        "mesh.stage": 8,
        "optimizer": "adamw_8bit",
        "offload.activations": True,
        "remat": "stage",
        "gradient_accumulation_steps": 16,
        "sequence_length": 10240,
    }

    def estimate(form):
        named = {**settings, "stage_form": form}
        return evaluator.estimate(Candidate("layerwise", named, train_config({"model": "synthetic:x", **named})))

    one, several = (estimate(form).memory.peak for form in ("one-jit", "programs"))
    assert several < one
    for limit, form in ((one, "auto"), (one - 1, "programs")):
        monkeypatch.setattr(Machine, "budget", Budget(limit, 0, 0))
        found = estimate("auto")
        assert found.candidate.config.stage_form == form
        assert found.memory.peak <= limit
        assert ("a program for each stage" in str(found.candidate)) == (form == "programs")


def test_the_cut_of_one_form_is_not_taken_for_that_of_another():
    """Four layers under a large head: equal stages in one program, three and one with a program each."""
    base = open_base("synthetic:smollm2-135m?layers=4", quantization="nf4", dtype="bfloat16", lora=LoraConfig(rank=2))
    shapes, stages = Shapes(base), {"model": "x", "strategy": "layerwise", "mesh.stage": 2}
    cuts = [shapes.layers(train_config(stages | {"stage_form": form})) for form in ("auto", "programs")]
    assert cuts == [(2, 2), (3, 1)]
