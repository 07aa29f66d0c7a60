"""From tensors in files to frozen parameters: every tensor in its place, and none of another model."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracles
import pytest
import safetensors.numpy
from flax import nnx

from models import tables
from models.parameters import by_path, split
from models.quantization import nf4
from zagora_jax.base import open_base
from zagora_jax.checkpoints.huggingface import HuggingFaceCheckpoint
from zagora_jax.errors import UserError

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def model(directory, edit=lambda tensors: None, **config):
    """A tiny checkpoint whose tensors `edit` has changed, in a dictionary by name."""
    oracles.tiny_llama(directory, tokenizer=False, **config)
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    edit(tensors)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def opened(directory, quantization="none", dtype="float32", embeddings="none"):
    return open_base(str(directory), quantization=quantization, dtype=dtype, lora=None, embeddings=embeddings)


def loaded(directory, **options):
    """The frozen parameters by dotted path, stacked over layers."""
    return {".".join(path): leaf.get_value() for path, leaf in by_path(opened(directory, **options).load()).items()}


def test_every_tensor_goes_to_its_place(tmp_path):
    # More than ten layers, so that their order by name is not their order by number; several files.
    directory = oracles.tiny_llama(
        tmp_path,
        tokenizer=False,
        num_hidden_layers=11,
        hidden_size=16,
        intermediate_size=32,
        max_shard_size="40KB",
        attention_bias=True,
    )
    stored = {
        name: array
        for file in directory.glob("*.safetensors")
        for name, array in safetensors.numpy.load_file(file).items()
    }
    assert len(list(directory.glob("*.safetensors"))) > 1
    found, seen = loaded(directory), set()
    for path, array in found.items():
        if path.startswith("model.layers."):
            names = [path.replace("layers.", f"layers.{layer}.") for layer in range(11)]
            np.testing.assert_array_equal(array, np.stack([stored[name] for name in names]))
        else:
            names = [path]
            np.testing.assert_array_equal(array, stored[path])
        seen.update(names)
    assert seen == stored.keys()


def test_linear_weights_alone_are_quantised_each_layer_by_itself(tmp_path):
    directory = model(tmp_path)
    stored = safetensors.numpy.load_file(directory / "model.safetensors")
    for path, value in loaded(directory, quantization="nf4", dtype="bfloat16").items():
        if not path.endswith("proj.weight"):
            assert value.dtype == (jnp.float32 if "norm" in path else jnp.bfloat16)
            continue
        for layer in range(2):
            expected = nf4.quantize(stored[path.replace("layers.", f"layers.{layer}.")])
            jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda x: x[layer], value), expected)  # noqa: B023


def test_the_callback_counts_the_tensors(tmp_path):
    base, calls = opened(model(tmp_path)), []
    base.load(calls.append)
    assert len(calls) == base.tensor_count() == 21
    assert sum(calls) == base.parameter_count()


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_every_floating_type_is_read(tmp_path, dtype):
    def cast(tensors):
        tensors |= {name: tensor.astype(dtype) for name, tensor in tensors.items()}

    found = loaded(model(tmp_path, cast))
    for path, array in found.items():
        assert array.dtype == jnp.float32
        stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
        first = stored[path.replace("layers.", "layers.0.")].astype(np.float32)
        np.testing.assert_array_equal(array[0] if "layers" in path else array, first)


def rename(old, new):
    def edit(tensors):
        for name in list(tensors):
            if old in name:
                tensors[name.replace(old, new)] = tensors.pop(name)

    return edit


def wrap_by_peft(tensors):
    rename("", "")(tensors)
    for name in list(tensors):
        tensors[f"base_model.model.{name}"] = tensors.pop(name)
    tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"] = np.zeros((4, 64), np.float32)


@pytest.mark.parametrize(
    ("edit", "messages"),
    [
        (lambda t: t.pop(DOWN), ["1 of 21 tensors are missing", repr(DOWN), "never made up"]),
        (lambda t: t.pop(HEAD), ["1 of 21 tensors are missing", repr(HEAD), "tie_word_embeddings to true"]),
        (rename("down_proj", "w2"), ["2 of 21 tensors are missing", "2 unexpected ones", "mlp.w2.weight"]),
        (wrap_by_peft, ["21 of 21 tensors are missing", "such as 'base_model.model.", "unmerged PEFT dump"]),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": t["model.norm.weight"]}),
            ["1 of 22 tensors have no place", "model.layers.0.self_attn.q_proj.bias", "model.safetensors"],
        ),
        (
            lambda t: t.update({DOWN.replace("layers.1", "layers.2"): t[DOWN]}),
            ["1 of 22 tensors have no place", "layers.2.mlp.down_proj"],
        ),
        (lambda t: t.update({DOWN: t[DOWN].T.copy()}), [DOWN, "(192, 64)", "asks for (64, 192)"]),
        (lambda t: t.update({EMBEDDING: t[EMBEDDING][:319]}), [EMBEDDING, "(319, 64)", "asks for (320, 64)"]),
        (lambda t: t.update({"model.norm.weight": np.ones((64, 1), np.float32)}), ["(64, 1)", "asks for (64,)"]),
        (lambda t: t.update({DOWN: np.ones((64, 192), np.int8)}), [DOWN, "int8"]),
    ],
)
def test_tensors_of_another_model_are_refused_before_any_is_read(tmp_path, monkeypatch, edit, messages):
    monkeypatch.setattr(HuggingFaceCheckpoint, "read", lambda *_: pytest.fail("a tensor was read"))
    monkeypatch.setattr(HuggingFaceCheckpoint, "read_rows", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(UserError) as caught:
        opened(model(tmp_path, edit))
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [DOWN, "model.norm.weight"])
def test_numbers_that_are_not_finite_are_refused(tmp_path, name, number):
    def spoil(tensors):
        tensors[name].flat[-1] = number

    with pytest.raises(UserError, match=rf"model\.safetensors: tensor {name} holds numbers that are not finite"):
        loaded(model(tmp_path, spoil), quantization="nf4")


@pytest.mark.parametrize("embeddings", ["int8", "nf4"])
def test_tables_are_quantised_row_by_row_as_they_come(tmp_path, monkeypatch, embeddings):
    monkeypatch.setattr("zagora_jax.checkpoints.read_ahead.PIECE_BYTES", 10_000)  # of 320 rows of 256 bytes
    directory = model(tmp_path)
    stored = safetensors.numpy.load_file(directory / "model.safetensors")
    found = loaded(directory, dtype="bfloat16", embeddings=embeddings)
    for name in (EMBEDDING, HEAD):
        jax.tree.map(np.testing.assert_array_equal, found[name], tables.quantize(embeddings, stored[name]))
    assert found["model.norm.weight"].dtype == jnp.float32
    tied = loaded(model(tmp_path / "tied", tie_word_embeddings=True), embeddings=embeddings)
    assert isinstance(tied[EMBEDDING], tables.QuantizedTable)
    assert HEAD not in tied


def test_rows_that_are_not_finite_are_refused(tmp_path):
    def spoil(tensors):
        tensors[HEAD][7, 3] = np.inf

    with pytest.raises(UserError, match=rf"tensor {HEAD} holds numbers that are not finite"):
        loaded(model(tmp_path, spoil), embeddings="int8")


def test_a_tied_head_is_the_embedding(tmp_path):
    base = opened(model(tmp_path, tie_word_embeddings=True))
    graph, _, adapters = split(base.model)
    tied = nnx.merge(graph, base.load(), adapters)
    assert tied.lm_head is None
    np.testing.assert_array_equal(tied.head, safetensors.numpy.load_file(tmp_path / "model.safetensors")[EMBEDDING])


def test_a_tied_head_may_be_stored_if_it_equals_the_embedding(tmp_path):
    stored_too = model(tmp_path, lambda t: t.update({HEAD: t[EMBEDDING].copy()}), tie_word_embeddings=True)
    assert "lm_head.weight" not in loaded(stored_too)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (lambda e: e + 1, "differ \\(largest difference 1\\)"),
        (lambda e: np.concatenate([e[:-1], e[-1:] + 0.5]), "differ \\(largest difference 0.5\\)"),
        (lambda e: np.where(e > 0, np.nan, e), "differ \\(largest difference nan\\)"),
        (lambda e: e[:-1], "have shapes \\(319, 64\\) and \\(320, 64\\)"),
    ],
)
def test_a_tied_head_that_differs_from_the_embedding_is_refused(tmp_path, monkeypatch, head, message):
    monkeypatch.setattr("zagora_jax.checkpoints.load.COMPARED_ROWS", 100)
    directory = model(tmp_path, lambda t: t.update({HEAD: head(t[EMBEDDING])}), tie_word_embeddings=True)
    with pytest.raises(UserError, match=f"lm_head.weight and model.embed_tokens.weight {message}"):
        opened(directory)


def test_stored_rotary_tables_are_not_read(tmp_path):
    def add_table(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.full(8, 7.0, np.float32)

    plain, with_table = loaded(model(tmp_path / "plain")), loaded(model(tmp_path / "table", add_table))
    assert plain.keys() == with_table.keys()
    for path, array in plain.items():
        np.testing.assert_array_equal(with_table[path], array)


def test_rows_beyond_the_tokenizer_stay(tmp_path):
    base = opened(oracles.tiny_llama(tmp_path))
    assert len(base.tokenizer()) == 259
    found = loaded(tmp_path)
    assert found[EMBEDDING].shape == found[HEAD].shape == (320, 64)
    assert base.model.config.vocab_size == 320
