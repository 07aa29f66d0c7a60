"""What fits and how fast, before anything is run: `configure` and `train` ask here."""

from zagora_jax.planning.compiled import compile_planned, compile_planned_step

__all__ = ["compile_planned", "compile_planned_step"]
