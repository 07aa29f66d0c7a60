"""The trainer for the texts of a domain."""

from collections.abc import Mapping, Sequence
from typing import Any

from zagora_jax.callbacks import Callback
from zagora_jax.data.in_memory import Dataset, sources_of
from zagora_jax.errors import UserError
from zagora_jax.options import Given
from zagora_jax.reporting.progress import Reporter
from zagora_jax.trainer import TrainResult
from zagora_jax.trainers import GeneratingTrainer
from zagora_jax.training_arguments import as_options, merged


class DomainAdaptationTrainer(GeneratingTrainer):
    """Trains a model further on the texts of a domain.

    The keys of its configuration are base_model, domain_data, epochs, batch_size_per_gpu, gradient_checkpointing,
    optimizer, max_length, and any other training argument or option. Unless they say otherwise, texts are packed, and
    long ones split.
    """

    _domain_data: Dataset | None = None

    NAMES: Mapping[str, str] = {
        "base_model": "model",
        "batch_size_per_gpu": "micro_batch_size",
        "max_length": "sequence_length",
    }
    USUAL: Mapping[str, Any] = {"packing": True, "long_rows": "split"}

    def __init__(
        self,
        config: Mapping[str, Any],
        gpu_count: int | None = None,
        communication_backend: str = "auto",
        *,
        callbacks: Sequence[Callback] = (),
        reporter: Reporter | None = None,
    ):
        """Take the configuration.

        Args:
            config: see above.
            gpu_count: use the first so many devices; all where not given.
            communication_backend: nccl for NVIDIA GPUs, which XLA has built in; auto is that for GPUs, and the host's
                memory for CPU devices.
            callbacks: are told what happens.
            reporter: prints the run's story.

        Raises:
            UserError: a key is unknown or a value wrong.
        """
        where = "config"
        if not isinstance(config, Mapping):
            raise UserError(f"{where}: expected a dict, found {type(config).__name__}")
        if missing := [name for name in ("base_model", "domain_data") if config.get(name) is None]:
            raise UserError(f"{where}: {missing[0]} is required; found {', '.join(config) or 'nothing'}")
        _check_backend(communication_backend)
        named = {self.NAMES.get(name, name): value for name, value in config.items() if name != "domain_data"}
        self._domain_data = config["domain_data"]
        called = {option: name for name, option in self.NAMES.items()} | {"data": "domain_data"}
        given = as_options(named, where, called).given
        for name in self.NAMES.keys() & config.keys():
            given[self.NAMES[name]] = given[self.NAMES[name]]._replace(where=f"{where}: {name}")
        if gpu_count is not None:
            if type(gpu_count) is not int or gpu_count < 1:
                raise UserError(f"DomainAdaptationTrainer: gpu_count: expected 1 or more, found {gpu_count!r}")
            given = merged(given, {"devices": Given(list(range(gpu_count)), "gpu_count")})
        usual = {name: Given(value, "DomainAdaptationTrainer") for name, value in self.USUAL.items()}
        super().__init__({**usual, **given}, callbacks, reporter)

    def adapt(self) -> TrainResult:
        """Train; see `DistributedTrainer.train`."""
        if self._domain_data is None:  # of a run that was taken up
            return self._train(self._options)
        sources = sources_of(self._domain_data, self._folder_of_rows(self.config), "domain_data")
        return self._train({**self._options, "data": Given(sources, "config: domain_data")})


def _check_backend(name: str) -> None:
    """Refuse a way between devices that there is none of.

    Raises:
        UserError: it is not nccl or auto, or nccl without NVIDIA GPUs.
    """
    import jax

    if name not in ("auto", "nccl"):
        raise UserError(
            f"communication_backend: expected auto or nccl, found {name!r}: XLA has NCCL built in for NVIDIA GPUs, and "
            "takes no other"
        )
    if name == "nccl" and jax.default_backend() != "gpu":
        raise UserError(f"communication_backend: nccl is for NVIDIA GPUs, found {jax.devices()[0].platform}; give auto")
