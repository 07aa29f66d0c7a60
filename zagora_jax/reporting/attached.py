"""What every run has attached by its options."""

from collections.abc import Callable

from zagora_jax.callbacks import Callback
from zagora_jax.config import TrainConfig
from zagora_jax.reporting.report_writer import ReportWriter


def attached(config: TrainConfig, say: Callable[[str], None]) -> list[Callback]:
    """Return the callbacks that `config` asks for; `say` is told what they have to say."""
    return [ReportWriter(say)]
