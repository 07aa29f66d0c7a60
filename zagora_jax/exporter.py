"""The export story: a run's adapter merged into its base model, or alone, with what goes with it and checked."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from models.lora import MAGNITUDE
from zagora_jax.adapter import PEFT_PREFIX, adapted_modules, check_scale, peft_config, peft_shapes, trained_modules
from zagora_jax.base import BaseModel, declare_model, open_base
from zagora_jax.checkpoints.checkpoint import Checkpoint
from zagora_jax.checkpoints.export_directory import check_replaceable, export_directory
from zagora_jax.checkpoints.json_files import parse_json_object
from zagora_jax.checkpoints.merge import Merge
from zagora_jax.checkpoints.merge_checks import MergeReport, Update
from zagora_jax.checkpoints.peft import AdapterConfig, begins_as_zero, read_adapter, write_adapter
from zagora_jax.checkpoints.synthetic import PREFIX
from zagora_jax.commands import ExportConfig
from zagora_jax.config import TrainConfig
from zagora_jax.config_file import load_config
from zagora_jax.end_tokens import CONFIGS, corrected
from zagora_jax.errors import UserError
from zagora_jax.factors import converted
from zagora_jax.model_card import adapter_card, merged_card
from zagora_jax.reporting.progress import Reporter
from zagora_jax.reporting.sensors import GIB
from zagora_jax.run_directory import RunDirectory
from zagora_jax.sentence_transformers_folder import write_modules
from zagora_jax.tuned import require_same_base, saved_adapter, with_initial_adapter

# Files that describe the weights, and so do not belong beside an adapter alone.
MODEL_FILES = ("config.json", "generation_config.json")
# Beside the tensors: headers, index, model card.
SPARE_BYTES = 16 * 2**20
# Of an update that is kept in rounding; below it, a wider dtype is recommended.
GOOD_SHARE = 0.95


@dataclass(frozen=True)
class ExportResult:
    """What was written.

    Attributes:
        directory: Where it stands.
        format: "merged" or "adapter".
        files: Names of all files, relative to the directory.
        checks: What was compared, a sentence each.
        merge: The numbers of a merge, None for an adapter alone.
    """

    directory: Path
    format: str
    files: tuple[str, ...]
    checks: tuple[str, ...]
    merge: MergeReport | None


@dataclass(frozen=True)
class _Source:
    """A run's adapter and the base model that it was trained on; both fit each other."""

    run: RunDirectory
    config: TrainConfig
    base: BaseModel
    checkpoint: Checkpoint
    tensors: dict[str, np.ndarray]
    adapter: AdapterConfig

    @property
    def base_name(self) -> str:
        """The base model's id on the hub, or an absolute path that serves from any working directory."""
        local = Path(self.checkpoint.name).expanduser()
        return str(local.resolve()) if local.exists() else self.checkpoint.name


def export(config: ExportConfig, reporter: Reporter | None = None) -> ExportResult:
    """Write an adapter of `config.run`, the newest or a checkpoint's, merged or alone, to `config.to`.

    Raises:
        UserError: wrong input, found before anything is written, or a result that is not worth writing.
        RuntimeError: what was written is not what was meant.
    """
    reporter = reporter or Reporter()
    check_replaceable(config.to, overwrite=config.overwrite)
    source = _open_source(config)
    _protect(config.to, source)
    source.base.tokenizer()  # must load, and warns where its ids contradict the config's
    with export_directory(config.to, overwrite=config.overwrite) as directory:
        if config.format == "merged":
            report, checks = _write_merged(directory, config, source, reporter)
            if source.config.retrieval.pooling != "none":
                write_modules(directory, source.config)
        else:
            report, checks = None, _write_adapter_alone(directory, config, source)
        files = tuple(sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()))
    for check in checks:
        reporter.say(f"checked: {check}")
    return ExportResult(config.to, config.format, files, checks, report)


def _open_source(config: ExportConfig) -> _Source:
    run = RunDirectory(config.run)
    run.require_run()
    trained, report = load_config(TrainConfig, run.config), run.read_report()
    if report.get("synthetic") or trained.model.startswith(PREFIX):
        raise UserError(f"{run.path}: was trained on {trained.model}, random weights: there is nothing to export")
    if config.base == "dequantized" and trained.quantization == "none":
        raise UserError(f"--base dequantized: {run.path} was trained with quantization none; leave --base out")
    base = open_base(trained.model, quantization="none", dtype="float32", lora=trained.lora)
    assert base.checkpoint is not None  # synthetic models were refused
    require_same_base(run, base)
    saved = saved_adapter(run, base, trained, config.checkpoint)
    _check_adapter(saved.path, base, saved.tensors)
    check_scale(saved.path, saved.config, base.model)
    source = _Source(run, trained, base, base.checkpoint, saved.tensors, saved.config)
    return source if trained.lora.initialization == "default" else _converted(config, source)


def _converted(config: ExportConfig, source: _Source) -> _Source:
    """Make of an adapter that began as a part of the weights one that stands beside the whole weights.

    What was trained stands beside the quantised weights; there PiSSA's are the weights without their principal part.
    """
    lora = source.config.lora
    initial, _ = read_adapter(source.run.initial_adapter)
    if all(name in initial and np.array_equal(tensor, initial[name]) for name, tensor in source.tensors.items()):
        raise UserError(f"{source.run.adapter}: is as before training: the tuned model is the base model")
    if config.format == "merged" and config.base == "dequantized":
        return replace(source, base=with_initial_adapter(source.run, source.base, source.config))
    if config.format == "adapter" and lora.initialization == "loftq":
        return source
    # Of twice the rank, at the same scale.
    factor = 2**0.5 if lora.use_rslora else 2
    doubled = lora.model_copy(
        update={
            "rank": 2 * lora.rank,
            "alpha": factor * lora.alpha,
            "rank_pattern": [f"{name}={2 * rank}" for name, rank in lora.rank_patterns.items()],
            "alpha_pattern": [f"{name}={factor * alpha!r}" for name, alpha in lora.alpha_patterns.items()],
            "initialization": "default",
        }
    )
    model = declare_model(source.base.model.config, quantization="none", dtype="float32", lora=doubled)
    return replace(
        source,
        base=replace(source.base, model=model),
        tensors=converted(source.tensors, initial),
        adapter=peft_config(model, doubled, source.config.model),
    )


def _check_adapter(directory: Path, base: BaseModel, tensors: dict[str, np.ndarray]) -> None:
    """Check that the adapter's tensors are those that the model was declared with, and that they were trained."""
    shapes = peft_shapes(base.model)
    for name in sorted(shapes.keys() ^ tensors.keys()):
        side = "lacks" if name in shapes else "holds"
        raise UserError(f"{directory}: {side} {name}, against the lora options in config.yaml of the run")
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            raise UserError(f"{directory}: tensor {name} has shape {tensor.shape}, the model needs {shapes[name]}")
        if not np.isfinite(tensor).all():
            raise UserError(f"{directory}: tensor {name} holds numbers that are not finite: the training diverged")
    if not any(tensor.any() for name, tensor in tensors.items() if begins_as_zero(name)):
        raise UserError(f"{directory}: every lora_B is zero, as before training: the tuned model is the base model")


def _protect(to: Path, source: _Source) -> None:
    """Refuse to write over, or around, what the export reads."""
    run = source.run
    for kept in (run.path, run.adapter, run.checkpoints, source.checkpoint.path):
        if kept.resolve().is_relative_to(to.resolve()):
            raise UserError(f"--to {to}: would replace {kept}, which the export reads. Give another directory")
    for folder in (run.adapter, run.checkpoints):
        if to.resolve().is_relative_to(folder.resolve()):
            raise UserError(f"--to {to}: lies in {folder}, which belongs to the run. Give another directory")


def _require_space(to: Path, tensor_bytes: int, checkpoint: Checkpoint) -> None:
    size = tensor_bytes + sum(map(len, checkpoint.assets.values())) + SPARE_BYTES
    parent = next(parent for parent in to.resolve().parents if parent.exists())
    free = shutil.disk_usage(parent).free
    if free < size:
        raise UserError(
            f"--to {to}: needs {size / GIB:.2f} GiB, but {parent} has {free / GIB:.2f} GiB free. Make room, or give a "
            "directory on another disk"
        )


def _write_merged(
    directory: Path, config: ExportConfig, source: _Source, reporter: Reporter
) -> tuple[MergeReport, tuple[str, ...]]:
    dequantized, weights = _base_weights(config, source)
    merge = Merge(
        source.checkpoint,
        source.base.model,
        _updates(source),
        replaced={
            f"{module}.weight": source.tensors[f"{PEFT_PREFIX}.{module}.weight"].astype(np.float32)
            for module in trained_modules(source.base.model)
        },
        dequantized=dequantized,
        prepare=source.base.prepare,
        dtype=None if config.dtype is None else np.dtype(jnp.dtype(config.dtype)),
    )
    _require_space(config.to, merge.total_bytes, source.checkpoint)
    facts = {
        "run": source.run.path,
        "base model": f"{source.checkpoint.name}, {weights}",
        "adapter": f"rank {source.adapter.r}, scale {source.adapter.scale:g}, {len(merge.updates)} weights",
        "files": f"{len(set(merge.layout.values()))}, {merge.total_bytes / GIB:.2f} GiB",
        "dtype": config.dtype or "as the source",
        "to": config.to,
    }
    reporter.banner("zagora-jax export", facts)
    with reporter.counting("merging tensors", len(merge.specs)) as count:
        report = merge.write(directory, count.advance)
    for name, data in source.checkpoint.assets.items():
        _write(directory / name, data)
    for name in CONFIGS:
        if name in source.checkpoint.assets:
            _write(directory / name, _configuration(name, source, config.dtype, reporter))
    checks = _describe(report, config)
    _write(directory / "README.md", merged_card(source.base_name, source.adapter, weights, checks).encode())
    return report, checks


def _base_weights(config: ExportConfig, source: _Source) -> tuple[str | None, str]:
    """Return the format that the base model's weights are brought into and back, if any, and their description."""
    stored = {found for name in source.checkpoint.tensors if (found := source.checkpoint.format_of(name)) is not None}
    if stored:  # the files' own weights are the ones that training saw
        return None, f"{', '.join(sorted(stored))} weights, dequantized"
    if config.base == "original":
        return None, "the original weights"
    return source.config.quantization, f"{source.config.quantization}, dequantized"


def _updates(source: _Source) -> dict[str, Update]:
    updates = {}
    for name, a in source.tensors.items():
        if name.endswith(".lora_embedding_A"):  # of the table's transpose
            module = name.removeprefix(f"{PEFT_PREFIX}.").removesuffix(".lora_embedding_A")
            b = source.tensors[name.replace(".lora_embedding_A", ".lora_embedding_B")]
            wide_a, wide_b = b.astype(np.float32).T, a.astype(np.float32).T
            updates[f"{module}.weight"] = Update(wide_a, wide_b, source.adapter.scale_of(module))
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix(f"{PEFT_PREFIX}.").removesuffix(".lora_A.weight")
            b = source.tensors[name.replace(".lora_A.", ".lora_B.")]
            magnitude = source.tensors.get(f"{PEFT_PREFIX}.{module}.{MAGNITUDE}")
            updates[f"{module}.weight"] = Update(
                a.astype(np.float32),
                b.astype(np.float32),
                source.adapter.scale_of(module),
                None if magnitude is None else magnitude.astype(np.float32),
            )
    return updates


def _configuration(name: str, source: _Source, dtype: str | None, reporter: Reporter) -> bytes:
    """Return the source's config.json or generation_config.json, byte for byte where no field has to change."""
    checkpoint = source.checkpoint
    content = parse_json_object(checkpoint.assets[name], f"{checkpoint.path}: {name}")
    changed = {key: value for key, value in content.items() if key != "quantization_config"}
    for key, value in corrected(content, source.base.tokenizer(), f"{checkpoint.path}: {name}").items():
        reporter.say(f"{name}: {key} {content.get(key)} -> {value}, as in training")
        changed[key] = value
    if name == "config.json" and dtype is not None:  # older versions of transformers say torch_dtype, newer ones dtype
        changed |= dict.fromkeys([key for key in ("dtype", "torch_dtype") if key in content] or ["torch_dtype"], dtype)
    return checkpoint.assets[name] if changed == content else (json.dumps(changed, indent=2) + "\n").encode()


def _describe(report: MergeReport, config: ExportConfig) -> tuple[str, ...]:
    checks = [
        f"{report.changed} of {report.adapted} adapted weights differ from the base model's",
        f"all {report.tensors} tensors, read back from the files, equal what was computed, bit for bit",
        f"before rounding, {report.columns} columns of the merged weights equal what the model's layers compute with "
        f"the adapter: largest deviation {report.largest_deviation:.1e}, {report.share_of_bound:.0%} of what float32 "
        "arithmetic allows",
        f"the rounded weights hold {report.share_kept:.2%} of the update",
    ]
    if report.share_kept < GOOD_SHARE and config.dtype != "float32":
        checks[-1] += "; --dtype float32 holds all of it"
    return tuple(checks)


def _write_adapter_alone(directory: Path, config: ExportConfig, source: _Source) -> tuple[str, ...]:
    modules = {*adapted_modules(source.base.model), *trained_modules(source.base.model)}
    size = sum(tensor.nbytes for tensor in source.tensors.values())
    _require_space(config.to, size, source.checkpoint)
    write_adapter(
        directory,
        source.tensors,
        replace(source.adapter, base_model_name_or_path=source.base_name),
        modules=modules,
        trained=True,
    )
    held = source.config.quantization if source.config.lora.initialization == "loftq" else None
    for file, data in source.checkpoint.assets.items():
        if file not in MODEL_FILES:
            _write(directory / file, data)
    _write(directory / "README.md", adapter_card(source.base_name, source.adapter, held).encode())
    return (
        f"{len(source.tensors)} tensors for {len(modules)} adapted weights ({size / 2**20:.1f} MiB), read back from "
        "the file, equal the run's, bit for bit",
    )


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
