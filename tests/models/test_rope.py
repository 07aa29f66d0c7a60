"""Rotary embedding against transformers', at positions where a wrong layout, base or scaling shows."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from models.rope import RopeConfig, apply_rope, rope_tables

HEAD_DIM, MAX_POSITIONS, THETA = 32, 128, 50000.0
POSITIONS = [1, 7, 100, 500]  # the last one is past every context here
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "llama3 without original length": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": None},
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn without original length": {"rope_type": "yarn", "factor": 4.0},
    "yarn with attention_factor": {"rope_type": "yarn", **YARN, "attention_factor": 0.8},
    "yarn with betas": {"rope_type": "yarn", **YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn with mscale": {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn with mscale alone": {"rope_type": "yarn", **YARN, "mscale": 0.7},
    "yarn without truncation": {"rope_type": "yarn", **YARN, "truncate": False},
    "yarn that extends nothing": {"rope_type": "yarn", **YARN, "factor": 1.0},
}


def read(scaling: dict | None, **config) -> RopeConfig:
    return RopeConfig.from_hf({"rope_theta": THETA, "rope_scaling": scaling, **config}, HEAD_DIM, MAX_POSITIONS)


def packed_tables(rope: RopeConfig, *lengths: int):
    """Tables [1, sum(lengths), D/2] of rows packed one after another."""
    positions = np.concatenate([np.arange(length) for length in lengths])[None]
    segments = np.repeat(np.arange(1, len(lengths) + 1), lengths)[None]
    return rope_tables(jnp.asarray(positions, jnp.int32), rope, jnp.asarray(segments, jnp.int32))


@pytest.fixture
def huggingface():
    """Build transformers' rotary module for rope_parameters."""
    pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    def build(scaling: dict):
        present = {key: value for key, value in scaling.items() if value is not None}
        config = LlamaConfig(
            hidden_size=4 * HEAD_DIM,
            num_attention_heads=4,
            max_position_embeddings=MAX_POSITIONS,
            rope_parameters={**present, "rope_theta": THETA},
        )
        return LlamaRotaryEmbedding(config)

    return build


@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_transformers(name, huggingface):
    import torch

    positions = np.array([POSITIONS])
    with torch.no_grad():
        expected = huggingface(SCALINGS[name])(torch.zeros(1), torch.tensor(positions))
    found = rope_tables(jnp.asarray(positions), read(SCALINGS[name]))
    # A frequency comes from about eight float32 operations, each off by 2^-24 at most of a value that does not
    # exceed the unscaled frequency; the angle is off by that times the position. Evaluating and scaling the cosine
    # adds at most 2^-22, the attention scaling being below 2.
    unscaled = THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    tolerance = 2 * (positions[..., None] * unscaled * 8 * 2**-24 + 2**-22)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == jnp.float32
        assert np.all(np.abs(ours - theirs.numpy()[..., : HEAD_DIM // 2]) <= tolerance)


@pytest.mark.parametrize("name", [name for name, scaling in SCALINGS.items() if scaling["rope_type"] != "dynamic"])
def test_frequencies_equal_transformers_to_the_last_bits(name, huggingface):
    # Eight float32 operations, of 2^-24 each; the blends of llama3 and yarn lose up to `factor` times that.
    factor = SCALINGS[name].get("factor", 1.0)
    expected = huggingface(SCALINGS[name]).inv_freq.numpy()
    np.testing.assert_allclose(read(SCALINGS[name]).inverse_frequencies(), expected, rtol=8 * factor * 2**-24)


def test_frequencies_of_llama_3_2():
    scaling = {**LLAMA3, "rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192}
    config = {"rope_theta": 500000.0, "rope_scaling": scaling}
    found = RopeConfig.from_hf(config, head_dim=64, max_positions=131072).inverse_frequencies()
    plain = 500000.0 ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(found[:15], plain[:15], rtol=1e-6)
    np.testing.assert_allclose(found[15:18], [0.00129055, 0.00042956, 0.0000970829], rtol=1e-5)
    np.testing.assert_allclose(found[18:], plain[18:] / 32, rtol=1e-6)


def test_yarn_scales_attention():
    assert read({"rope_type": "yarn", **YARN}).attention_scaling == pytest.approx(1.13863, abs=1e-5)
    cos, _ = rope_tables(jnp.zeros((1, 1), jnp.int32), read({"rope_type": "yarn", **YARN}))
    np.testing.assert_allclose(cos, 1.13863, atol=1e-5)


@pytest.mark.parametrize("name", SCALINGS)
def test_every_layout_of_the_config_reads_the_same(name):
    scaling = SCALINGS[name]
    expected = read(scaling)
    old = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    layouts = [
        {"rope_theta": THETA, "rope_scaling": old, "rope_parameters": None},
        {"rope_theta": THETA, "rope_scaling": {**old, **scaling}},
        {"rope_parameters": {**scaling, "rope_theta": THETA}, "rope_theta": None},
        {"rope_parameters": {**scaling, "rope_theta": THETA}, "rope_scaling": scaling, "rope_theta": THETA},
    ]
    for layout in layouts:
        assert RopeConfig.from_hf(layout, HEAD_DIM, MAX_POSITIONS) == expected


@pytest.mark.parametrize("config", [{}, {"rope_scaling": None, "rope_theta": None}, {"rope_scaling": {}}])
def test_a_silent_config_means_plain_rope(config):
    rope = RopeConfig.from_hf(config, HEAD_DIM, MAX_POSITIONS)
    assert (rope.rope_type, rope.theta) == ("default", 10000.0)
    np.testing.assert_allclose(
        rope.inverse_frequencies(), 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"rope_type": "foo"}}, r"config.json:rope_scaling.rope_type 'foo'.*default, linear, dynamic"),
        ({"rope_scaling": {"type": "longrope"}}, r"config.json:rope_scaling.rope_type 'longrope'"),
        ({"rope_parameters": {"rope_type": "foo"}}, r"config.json:rope_parameters.rope_type 'foo'"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}}, r"'linear', but .*'yarn'"),
        ({"rope_scaling": {"factor": 2.0}}, r"rope_scaling.factor is given without config.json:rope_scaling.rope_type"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"config.json:rope_scaling.factor is missing"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": None}}, r"config.json:rope_scaling.factor is missing"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, r"config.json:rope_parameters.factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"low_freq_factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, r"high_freq_factor must be"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, r"factor must be a positive number, found '2'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, r"factor must be a positive number"),
        ({"rope_scaling": {"rope_type": "yarn", **YARN, "truncate": 1}}, r"truncate must be true or false"),
        ({"rope_scaling": "linear"}, r"config.json:rope_scaling must be an object"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r"rope_type \['yarn'\] is not supported"),
        ({"rope_parameters": {"full_attention": {}}}, r"rope_parameters.full_attention is an object"),
        ({"rope_theta": 0}, r"config.json:rope_theta must be a positive number"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, r"rope_parameters.rope_theta is 500000"),
        (
            {"rope_parameters": {"rope_type": "yarn", **YARN}, "original_max_position_embeddings": 9},
            r"remove the wrong",
        ),
        ({"partial_rotary_factor": 0.5}, r"config.json:partial_rotary_factor is not supported"),
    ],
)
def test_wrong_settings_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig.from_hf(config, HEAD_DIM, MAX_POSITIONS)


def test_an_odd_head_is_refused():
    with pytest.raises(ValueError, match="head_dim 31"):
        RopeConfig.from_hf({}, 31, MAX_POSITIONS)


def test_dynamic_is_plain_within_the_context():
    positions = jnp.arange(MAX_POSITIONS)[None]
    dynamic, plain = rope_tables(positions, read(SCALINGS["dynamic"])), rope_tables(positions, read(None))
    for scaled, expected in zip(dynamic, plain, strict=True):
        np.testing.assert_array_equal(scaled, expected)


def test_dynamic_of_a_packed_row_is_that_of_the_row_alone():
    rope = read(SCALINGS["dynamic"])
    cos, sin = packed_tables(rope, 300, 20, 200)
    for start, length in [(0, 300), (300, 20), (320, 200)]:
        alone_cos, alone_sin = rope_tables(jnp.arange(length)[None], rope)
        # The same operations on the same numbers; vectorised differently they may differ in a last bit of an angle.
        tolerance = 300 * 2**-24
        np.testing.assert_allclose(cos[:, start : start + length], alone_cos, atol=tolerance)
        np.testing.assert_allclose(sin[:, start : start + length], alone_sin, atol=tolerance)


def test_dynamic_of_a_packed_row_ignores_its_neighbours():
    rope = read(SCALINGS["dynamic"])
    one, _ = packed_tables(rope, 150, 370)
    other, _ = packed_tables(rope, 150, 200, 170)
    np.testing.assert_array_equal(one[:, :150], other[:, :150])
    assert not np.array_equal(one[:, 150:350], other[:, 150:350])


def test_length_overrides_that_of_the_rows():
    rope, positions = read(SCALINGS["dynamic"]), jnp.asarray([[3, 4], [3, 4]])
    short, _ = rope_tables(positions, rope)
    both, _ = rope_tables(positions, rope, length=400)
    one, _ = rope_tables(positions, rope, length=jnp.asarray([5, 400]))
    np.testing.assert_array_equal(one[0], short[0])
    np.testing.assert_array_equal(one[1], both[1])
    assert not np.array_equal(short[1], both[1])


def test_length_means_nothing_to_other_types():
    rope, positions = read(SCALINGS["yarn"]), jnp.asarray([POSITIONS])
    np.testing.assert_array_equal(rope_tables(positions, rope, length=9999)[0], rope_tables(positions, rope)[0])


def test_rotation_equals_transformers():
    torch = pytest.importorskip("torch")
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x = np.random.default_rng(0).standard_normal((2, len(POSITIONS), 3, HEAD_DIM)).astype(np.float32)
    cos, sin = rope_tables(jnp.asarray([POSITIONS, POSITIONS]), read(None))
    doubled = [torch.tensor(np.concatenate([table, table], axis=-1)) for table in (cos, sin)]
    expected, _ = apply_rotary_pos_emb(torch.tensor(x), torch.tensor(x), *doubled, unsqueeze_dim=2)
    # Two products and a sum of values below 8.
    np.testing.assert_allclose(apply_rope(jnp.asarray(x), cos, sin), expected.numpy(), atol=8 * 2 * 2**-24)


def test_rotation_of_bfloat16_is_computed_in_float32():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, len(POSITIONS), 3, HEAD_DIM)), jnp.bfloat16)
    tables = rope_tables(jnp.asarray([POSITIONS]), read(None))
    found = apply_rope(x, *tables)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, apply_rope(x.astype(jnp.float32), *tables).astype(jnp.bfloat16))


def test_settings_can_be_static_under_jit():
    assert hash(read(SCALINGS["yarn"])) == hash(dataclasses.replace(read(SCALINGS["yarn"])))
