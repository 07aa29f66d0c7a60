"""What every run has attached by its options."""

from collections.abc import Callable

from zagora_jax.callbacks import Callback
from zagora_jax.config import TrainConfig
from zagora_jax.reporting.report_writer import ReportWriter
from zagora_jax.reporting.tracking import trackings


def attached(config: TrainConfig, say: Callable[[str], None]) -> list[Callback]:
    """Return the callbacks that `config` asks for; `say` is told what they have to say.

    Raises:
        UserError: a tracker's package is not installed.
    """
    return [ReportWriter(say), *trackings(config.track or [], say)]
