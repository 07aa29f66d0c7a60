"""The loss of a run's tuned model on held-out rows, or on others."""

from jax.sharding import Mesh

from sharding.mesh import rows_divisor
from zagora_jax.arrange import arrange
from zagora_jax.commands import EvaluateConfig
from zagora_jax.config import TrainConfig
from zagora_jax.devices import choose_mesh
from zagora_jax.errors import UserError
from zagora_jax.evaluation import Evaluation
from zagora_jax.evaluation_sets import compile_sets, evaluation_sets
from zagora_jax.frozen_weights import load_weights
from zagora_jax.host_memory import allow_pinned_memory
from zagora_jax.kernels import forward_options
from zagora_jax.option_groups import MeshConfig
from zagora_jax.reporting.progress import Reporter
from zagora_jax.residency import settle_source, settle_streaming
from zagora_jax.run_directory import RunDirectory
from zagora_jax.tuned import open_tuned


def evaluate_run(config: EvaluateConfig, reporter: Reporter) -> Evaluation:
    """Measure a run's tuned model on rows: those given, or else those that the run held out.

    Raises:
        UserError: the run cannot be opened, there are no rows, or something is wrong with them.
    """
    allow_pinned_memory(RunDirectory(config.run).read_config())
    tuned = open_tuned(config.run, config.checkpoint)
    options = {"micro_batch_size": config.micro_batch_size, "sequence_length": config.sequence_length}
    run_config = tuned.config.model_copy(update={name: value for name, value in options.items() if value is not None})
    run_config, mesh = _laid_out_here(run_config)
    sets = evaluation_sets(run_config, tuned.base, rows_divisor(mesh), reporter, config.data)
    if not sets:
        raise UserError(f"{config.run}: the run has no eval_data, no eval_fraction and no eval_sets; give --data")
    settled = settle_streaming(run_config, tuned.base, mesh, reporter.say)
    arrangement = arrange(settle_source(settled, tuned.base, mesh, reporter.say), tuned.base.model, mesh)
    with reporter.loading(tuned.base.parameter_count()) as on_tensor:
        frozen = load_weights(tuned.base, arrangement, on_tensor, reporter.say)
    measure = compile_sets(sets, forward_options(run_config, tuned.base), arrangement, frozen)
    try:
        return measure(arrangement.put_adapters(tuned.adapters))
    finally:
        if arrangement.feed is not None:
            arrangement.feed.close()


def _laid_out_here(config: TrainConfig) -> tuple[TrainConfig, Mesh]:
    """Lay devices out as in training where there are enough of them, or else all; the loss is the same."""
    try:
        mesh = choose_mesh(config)
    except UserError:
        config = config.model_copy(update={"mesh": MeshConfig(), "devices": None})
        mesh = choose_mesh(config)
    given = config.stage_layers
    if given != "auto" and len(given) != mesh.shape["stage"]:
        config = config.model_copy(update={"stage_layers": "auto"})
    # Whatever is against one program here was not in training, or the other way round.
    form = config.stage_form if config.stage_form == "programs" else "auto"
    no_exchange = {"gradient_compression": "none", "gradient_exchange": "synchronous"}  # there are no gradients
    return config.model_copy(update={"stage_form": form, **no_exchange}), mesh
