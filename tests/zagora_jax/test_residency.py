"""How many layers wait in host memory, and when that is decided."""

import oracles
import pytest
import runs

from zagora_jax import trainer
from zagora_jax.errors import UserError
from zagora_jax.option_groups import OffloadConfig
from zagora_jax.streaming import fitting_order, streamed_of_stages
from zagora_jax.trainer import train

GIB = 2**30


@pytest.mark.parametrize(("limit", "streamed"), [(8, 80), (10, 80), (12, 76), (24, 52), (50, None)])
def test_what_a_streaming_step_leaves_is_filled_with_layers(limit, streamed):
    order = fitting_order(80, GIB // 2, planned=9 * GIB, limit=limit * GIB)
    assert (order and order.streamed_layers) == streamed


@pytest.mark.parametrize(
    ("weights", "streamed"),
    [("none", [0, 0, 0]), ("all", [3, 5, 2]), ("auto", [3, 5, 2]), (1, [0, 0, 1]), (7, [2, 3, 2])],
)
def test_a_number_of_layers_is_shared_out_over_the_stages(weights, streamed):
    assert streamed_of_stages(weights, [3, 5, 2]) == streamed


def test_a_bad_row_is_named_before_anything_is_compiled(tmp_path, monkeypatch):
    def compiles(*_):
        raise AssertionError("compiled before the rows were read")

    monkeypatch.setattr(trainer, "settle_streaming", compiles)
    rows = runs.write_rows(tmp_path / "rows.jsonl", 3)
    rows.write_text(rows.read_text() + '{"messages": 1}\n')
    model = oracles.tiny_llama(tmp_path / "m")
    config = runs.tiny_config(
        model, tmp_path / "run", rows, remat="full", strategy="streaming", offload=OffloadConfig(weights="auto")
    )
    with pytest.raises(UserError, match=r"rows\.jsonl, line 4"):
        train(config, runs.recorder()[0])
