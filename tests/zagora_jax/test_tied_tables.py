"""A head that is the embedding: one array in all that a step is given."""

import jax
import numpy as np
import oracles
import runs

from zagora_jax import trainer
from zagora_jax.option_groups import LoraConfig


def begun(tmp_path, name, **lora):
    """A run, its frozen weights and its state, none of whose buffers stands twice; and its tables."""
    model = oracles.tiny_llama(tmp_path / "model", tie_word_embeddings=True, vocab_size=323)
    rows = runs.write_rows(tmp_path / "rows.jsonl", 8)
    options = {"lora": LoraConfig(rank=2, targets=["q_proj"], **lora), "max_steps": 2}
    run = trainer._Run(runs.tiny_config(model, tmp_path / name, rows, **options), runs.recorder()[0])
    frozen, state = run._load(), run._initial_state()
    leaves = jax.tree.leaves((frozen, state))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
    return run, frozen, state, [leaf for leaf in leaves if 323 in leaf.shape]


def test_a_frozen_table_is_one_array(tmp_path):
    assert len(begun(tmp_path, "run")[-1]) == 1


def test_a_table_trained_under_both_names_is_one_array_that_can_be_donated(tmp_path):
    run, frozen, state, tables = begun(tmp_path, "run", modules_to_save=["embed_tokens", "lm_head"])
    assert len(tables) == 3  # with its moments
    run.directory.create()
    compiled, batch = run._compile_step(), next(run.iterator)
    after, metrics = compiled(state, frozen, batch)
    assert np.isfinite(float(metrics["loss"]))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.adapters))
    compiled(after, frozen, batch)
