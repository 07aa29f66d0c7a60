"""Cuts into stages that options ask for, and those that are none."""

import pytest
from jax.sharding import AbstractMesh

from sharding.mesh import AXES
from zagora_jax.arrange import arrange, layers_of_stages
from zagora_jax.base import open_base
from zagora_jax.config import TrainConfig
from zagora_jax.devices import mesh_sizes
from zagora_jax.errors import UserError
from zagora_jax.option_groups import MeshConfig, OffloadConfig

NAME = "synthetic:llama-3-8b?layers=8"


@pytest.fixture(scope="module")
def model():
    return open_base(NAME, quantization="nf4", dtype="bfloat16", lora=None).model


def cut(model, stages, stage_layers="auto", stage_form="auto"):
    config = TrainConfig(model=NAME, strategy="layerwise", stage_layers=stage_layers, stage_form=stage_form)
    return layers_of_stages(config, model, AbstractMesh((stages, 1, 1, 1), AXES))


def test_a_list_is_taken(model):
    assert cut(model, 3, [1, 5, 2]) == [1, 5, 2]


def test_the_estimate_spares_the_stage_with_the_head(model):
    # Llama 3 8B's head takes as much as 1.6 layers.
    assert cut(model, 1) == [8]
    assert cut(model, 2, stage_form="programs") == [5, 3]
    assert sum(cut(model, 3)) == 8


def test_stages_in_one_program_are_equal(model):
    assert cut(model, 2) == [4, 4]
    assert cut(model, 4) == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("stages", "given", "message"),
    [
        (9, "auto", "--mesh.stage 9: the model has 8 layers; a stage needs at least one"),
        (2, [4, 5], "--stage-layers 4,5: expected 2 numbers, one a stage, that sum to the model's 8 layers; found 2"),
        (2, [4, 3, 1], "--stage-layers 4,3,1: expected 2 numbers.*found 3, which sum to 8"),
    ],
)
def test_a_cut_that_is_none_is_refused(model, stages, given, message):
    with pytest.raises(UserError, match=message):
        cut(model, stages, given)


def test_a_stage_without_layers_is_refused():
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        TrainConfig(model=NAME, strategy="layerwise", stage_layers=[8, 0])


def test_stages_are_for_layerwise():
    assert mesh_sizes(TrainConfig(model=NAME, strategy="layerwise"), 4, "") == {"stage": 4}
    both = TrainConfig(model=NAME, strategy="layerwise", mesh=MeshConfig(data=2))
    assert mesh_sizes(both, 4, "") == {"data": 2, "stage": 2}
    with pytest.raises(UserError, match=r"--mesh.stage 2: stages are for --strategy layerwise"):
        mesh_sizes(TrainConfig(model=NAME, mesh=MeshConfig(stage=2)), 4, "")
    with pytest.raises(ValueError, match=r"offload.embedding is for strategy layerwise"):
        TrainConfig(model=NAME, offload=OffloadConfig(embedding=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_compression": "int8"}, "--gradient-compression int8: each stage is one device, .* --mesh.data 2"),
        ({"gradient_exchange": "delayed"}, "--gradient-exchange delayed does not go with --strategy layerwise"),
    ],
)
def test_stages_of_one_device_have_nobody_to_send_gradients_to(model, options, message):
    mesh = AbstractMesh((2, 1, 1, 1), AXES)
    with pytest.raises(UserError, match=message):
        arrange(TrainConfig(model=NAME, strategy="layerwise", **options), model, mesh)
