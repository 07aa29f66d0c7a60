import importlib
from pathlib import Path

import pytest

from zagora_jax.errors import UserError


def test_a_card_that_nobody_knows_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    benchmark = importlib.import_module("memory")
    monkeypatch.setattr("sys.argv", ["memory.py", "--gpu", "rtx0", "--model", "synthetic:llama-3-8b"])
    with pytest.raises(UserError, match="--gpu rtx0: GPU 'rtx0' is not known"):
        benchmark.main()
