import json
from types import SimpleNamespace

import chat_tokenizers as kinds
import numpy as np
import pytest
from runs import recorder, tiny_config

from zagora_jax.config import TrainConfig
from zagora_jax.data.prepare import evaluation_batches, training_batches
from zagora_jax.errors import UserError
from zagora_jax.reporting.progress import Reporter

BASE = SimpleNamespace(synthetic=False, tokenizer=kinds.byte_level)


def write(path, name, count):
    path.write_text("".join(json.dumps({"text": f"{name} {number}"}) + "\n" for number in range(count)))
    return path


def texts(batches) -> list[str]:
    tokenizer = kinds.byte_level()
    steps = [np.concatenate(batches.rows_of_step(step)) for step in range(batches.steps_per_epoch())]
    rows = [batches.examples[row] for row in np.concatenate(steps)]
    return sorted(tokenizer.decode(row.tokens, skip_special_tokens=True) for row in rows)


def both(config):
    reporter, printed = recorder()
    return training_batches(config, BASE, 1, reporter), evaluation_batches(config, BASE, 1, reporter), printed()


def test_a_part_is_held_out_and_never_trained_on(tmp_path):
    path = write(tmp_path / "a.jsonl", "row", 60)
    config = tiny_config(tmp_path, tmp_path, path, eval_fraction=0.1)
    training, held_out, printed = both(config)
    assert texts(held_out) == sorted(f"row {number}" for number in (1, 22, 23, 31, 57))
    assert sorted(texts(training) + texts(held_out)) == sorted(f"row {number}" for number in range(60))
    assert "data: 55 of 55 rows" in printed
    assert "eval data: 5 of 5 rows" in printed
    everything, nothing, _ = both(tiny_config(tmp_path, tmp_path, path))
    assert len(everything.examples) == 60
    assert nothing is None


def test_rows_that_are_given_go_before_those_held_out(tmp_path):
    path, other = write(tmp_path / "a.jsonl", "row", 60), write(tmp_path / "b.jsonl", "other", 2)
    config = tiny_config(tmp_path, tmp_path, path, eval_fraction=0.1)
    batches = evaluation_batches(config, BASE, 1, recorder()[0], [str(other)])
    assert texts(batches) == ["other 0", "other 1"]


def test_no_row_to_hold_out_is_an_error(tmp_path):
    config = tiny_config(tmp_path, tmp_path, write(tmp_path / "a.jsonl", "row", 1), eval_fraction=0.01)
    with pytest.raises(UserError, match="eval_fraction leaves none of the 1 rows for this part"):
        both(config)


def test_sources_are_mixed_by_their_weights(tmp_path):
    write(tmp_path / "a.jsonl", "a", 3)
    write(tmp_path / "b.jsonl", "b", 8)
    config = tiny_config(tmp_path, tmp_path, tmp_path / "a.jsonl").model_copy(
        update={"data": [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], "data_weights": [2.0, 0.25]}
    )
    training, _, printed = both(config)
    assert [text for text in texts(training) if text.startswith("a")] == ["a 0", "a 0", "a 1", "a 1", "a 2", "a 2"]
    assert len(texts(training)) == 8
    assert "b.jsonl: 8 rows, " in printed
    assert "0.25 passes an epoch" in printed
    config = config.model_copy(update={"data_weights": [0.1, 0.01]})
    with pytest.raises(UserError, match="leaves no row in an epoch"):
        both(config)


def test_random_rows_come_as_often_as_there_are_epochs(tmp_path):
    config = TrainConfig(
        model="synthetic:tiny",
        max_steps=6,
        epochs=3,
        gradient_accumulation_steps=1,
        micro_batch_size=2,
        sequence_length=8,
        output=tmp_path,
    )
    base = SimpleNamespace(synthetic=True, model=SimpleNamespace(config=SimpleNamespace(vocab_size=1000)))
    batches = training_batches(config, base, 2, Reporter()).from_step(0, config.max_steps)
    rows = [row.tobytes() for _ in range(6) for row in next(batches).tokens.reshape(-1, 8)]
    assert len(rows) == 6 * 4
    assert {rows.count(row) for row in rows} == {3}
