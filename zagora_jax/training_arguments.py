"""Arguments as transformers' Trainer takes them, as the options of a training."""

import dataclasses
import enum
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from zagora_jax.config import TrainConfig
from zagora_jax.errors import UserError
from zagora_jax.option_groups import Options
from zagora_jax.options import Given, options_of, written

# Names of transformers (and of trl's SFTConfig) for options that have another name here.
RENAMED = {
    "logging_steps": "log_every",
    "max_length": "sequence_length",
    "max_seq_length": "sequence_length",
    "output_dir": "output",
    "per_device_train_batch_size": "micro_batch_size",
    "load_best_model_at_end": "keep_best",
    "resume_from_checkpoint": "resume",
    "save_steps": "save_every",
    "save_total_limit": "keep_checkpoints",
}
SCHEDULES = {"constant_with_warmup": "constant"}
OPTIMIZERS = {
    "adamw_hf": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit",
}
# What can only be as it is here.
FIXED = {
    "adam_beta1": (0.9,),
    "adam_beta2": (0.999,),
    "adam_epsilon": (1e-8,),
    "greater_is_better": (False,),
    "logging_strategy": ("steps",),
    "metric_for_best_model": ("loss", "eval_loss"),
    "save_strategy": ("steps",),
}
# Given to the trainer, or the default here, unless an object says otherwise than its class.
NOT_BY_DEFAULT = {"gradient_accumulation_steps", "per_device_eval_batch_size", "report_to"}
ADVICE = {
    "ddp_backend": "devices of one process need none",
    "deepspeed": "give partition_strategy in its place",
    "eval_accumulation_steps": "evaluations keep no outputs",
    "fsdp": "give partition_strategy='fsdp' in its place",
    "fsdp_config": "give partition_strategy='fsdp' in its place",
    "group_by_length": "give packing=True in its place",
    "push_to_hub": "export the run, and upload that",
    "use_cpu": "set JAX_PLATFORMS=cpu",
}

Arguments = Mapping[str, Any] | Any | None


class Translated(NamedTuple):
    """Options that training arguments give, and those that an object of them has from its class's defaults."""

    given: dict[str, Given]
    usual: dict[str, Given]


def as_options(
    arguments: Arguments, where: str = "training_args", called: Mapping[str, str] | None = None
) -> Translated:
    """Translate training arguments.

    Args:
        arguments: an object such as transformers.TrainingArguments, all of whose values count where they mean anything
            here; or a mapping of what is to differ from this program's own defaults. Names are transformers' or those
            of options here.
        where: what they are called in errors.
        called: options that have another name there, by their names here.

    Raises:
        UserError: names what has no meaning here, or a value that cannot be kept.
    """
    if arguments is None:
        return Translated({}, {})
    values, untouched = _read(arguments, where)
    given: dict[str, Given] = {}
    usual: dict[str, Given] = {}
    for name in values:
        try:
            translated = _translated(name, values, is_usual=name in untouched, where=where, called=called or {})
        except ValueError as error:
            raise UserError(f"{where}: {name}: {error}") from None
        except TypeError:
            raise UserError(f"{where}: {name}: {values[name]!r} is no value that it can have") from None
        options = {option: Given(item, f"{where}: {name}") for option, item in translated.items()}
        if name in untouched:
            usual |= options
        else:
            given = merged(given, options)
    return Translated(given, usual)


def own_options(values: Mapping[str, Any], where: str) -> dict[str, Given]:
    """Take options under their own names, groups as mappings or objects: {"lora": {"rank": 8}}.

    Raises:
        UserError: there is no such option.
    """
    known = options_of(TrainConfig)
    given: dict[str, Given] = {}
    for name, value in values.items():
        if name in known:
            given[name] = Given(_as_text(value) if Path not in known[name].types else value, f"{where}: {name}")
        elif any(option.startswith(f"{name}.") for option in known):
            group = value.model_dump(exclude_unset=True) if isinstance(value, Options) else value
            if not isinstance(group, Mapping):
                raise UserError(f"{where}: {name}: expected a dict of its options, found {written(value)}")
            given |= own_options({f"{name}.{field}": item for field, item in group.items()}, where)
        else:
            raise UserError(_unknown(name, where, {}))
    return given


def _as_text(value: Any) -> Any:
    """Return paths as texts, also in a list."""
    if isinstance(value, list | tuple):
        return [_as_text(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def merged(first: Mapping[str, Given], second: Mapping[str, Given]) -> dict[str, Given]:
    """Join what was given in two places; what is given twice must agree.

    Raises:
        UserError: it does not.
    """
    for name in first.keys() & second.keys():
        if first[name].value != second[name].value:
            raise UserError(
                f"{name} is given twice: {first[name].value!r} ({first[name].where}) and {second[name].value!r} "
                f"({second[name].where}): leave one of them out"
            )
    return {**first, **second}


def _read(arguments: Arguments, where: str) -> tuple[dict[str, Any], set[str]]:
    """Return the values by name, and the names of those that an object has from its class."""
    if isinstance(arguments, Mapping):
        return {str(name): _plain(value) for name, value in arguments.items()}, set()
    if not dataclasses.is_dataclass(arguments) or isinstance(arguments, type):
        raise UserError(
            f"{where}: expected transformers.TrainingArguments, a dict or None, found {type(arguments).__name__}"
        )
    names = [field.name for field in dataclasses.fields(arguments) if field.init]
    values = {name: _plain(getattr(arguments, name, None)) for name in names}
    try:  # which fills in what depends on the machine
        usual = type(arguments)(output_dir=values["output_dir"])  # type: ignore[call-arg]
        untouched = {name for name in names if _plain(getattr(usual, name, None)) == values[name]}
    except Exception:  # a subclass may need more than that, or find no torch
        defaults = {field.name: field.default for field in dataclasses.fields(arguments)}
        untouched = {name for name in names if _plain(defaults[name]) == values[name]}
    return values, untouched - {"output_dir"}


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


def _translated(
    name: str, values: Mapping[str, Any], *, is_usual: bool, where: str, called: Mapping[str, str]
) -> dict[str, Any]:
    """Return the options that one of the arguments gives.

    Raises:
        ValueError: the value cannot be kept; says what was expected.
    """
    value, known = values[name], options_of(TrainConfig)
    if is_usual and (name in NOT_BY_DEFAULT or name in FIXED):
        return {}
    if name in CONVERTED:
        return CONVERTED[name](values)
    if value is None and name not in known:
        return {}
    if name in FIXED:
        if value not in FIXED[name]:
            raise ValueError(f"expected {' or '.join(map(repr, FIXED[name]))}, found {value!r}")
        return {}
    if name in RENAMED:
        return {RENAMED[name]: value}
    if name in known or any(option.startswith(f"{name}.") for option in known):
        return {option: item.value for option, item in own_options({name: value}, where).items()}
    if is_usual:
        return {}
    raise UserError(_unknown(name, where, called))


def _unknown(name: str, where: str, called: Mapping[str, str]) -> str:
    if name in ADVICE:
        return f"{where}: {name}: has no counterpart here; leave it out: {ADVICE[name]}"
    known = [called.get(option, option) for option in (*options_of(TrainConfig), *RENAMED, *CONVERTED, *FIXED)]
    close = get_close_matches(name, known, n=1)
    advice = f"did you mean {close[0]}?" if close else "leave it out; docs/trainers.md lists the names"
    return f"{where}: {name}: has no counterpart here; {advice}"


def _epochs(values: Mapping[str, Any]) -> dict[str, Any]:
    epochs = values["num_train_epochs"]
    if isinstance(epochs, float) and not epochs.is_integer():
        raise ValueError(f"expected a whole number, found {epochs}; give max_steps for a part of an epoch")
    return {"epochs": int(epochs) if isinstance(epochs, float) else epochs}


def _max_steps(values: Mapping[str, Any]) -> dict[str, Any]:
    return {} if values["max_steps"] in (-1, None) else {"max_steps": values["max_steps"]}


def _warmup(values: Mapping[str, Any]) -> dict[str, Any]:
    steps, ratio = values.get("warmup_steps") or 0, values.get("warmup_ratio") or 0
    if isinstance(steps, float) and 0 < steps < 1:  # as newer versions write the ratio
        steps, ratio = 0, steps
    if steps and ratio:
        return {"warmup_steps": steps}  # which goes before the ratio there too
    if ratio:
        return {"warmup_ratio": float(ratio)}
    return {"warmup_steps": int(steps)} if steps else {}


def _is_true(name: str, values: Mapping[str, Any]) -> bool:
    value = values.get(name)
    if value not in (True, False, None):
        raise ValueError(f"expected true or false, found {written(value)}")
    return bool(value)


def _schedule(values: Mapping[str, Any]) -> dict[str, Any]:
    name = values["lr_scheduler_type"]
    return {"schedule": SCHEDULES.get(name, name)}


def _optimizer(values: Mapping[str, Any]) -> dict[str, Any]:
    name = values["optim"]
    return {"optimizer": OPTIMIZERS.get(name, name)}


def _compute_dtype(values: Mapping[str, Any]) -> dict[str, Any]:
    bf16, fp16 = _is_true("bf16", values), _is_true("fp16", values)
    if bf16 and fp16:
        raise ValueError("bf16 and fp16 are both true: give one of them")
    return {"compute_dtype": "bfloat16" if bf16 else "float16" if fp16 else "float32"}


def _remat(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"remat": "full" if _is_true("gradient_checkpointing", values) else "auto"}


def _eval_batch_size(values: Mapping[str, Any]) -> dict[str, Any]:
    size, trained = values["per_device_eval_batch_size"], values.get("per_device_train_batch_size")
    if trained is not None and size != trained:
        raise ValueError(f"expected that of training, {trained}, found {size}: evaluations take as many rows")
    return {} if trained is not None else {"micro_batch_size": size}


def _eval_every(values: Mapping[str, Any]) -> dict[str, Any]:
    strategy = values.get("eval_strategy") or values.get("evaluation_strategy")
    steps = values.get("eval_steps")
    if strategy == "no":
        return {}
    if strategy not in (None, "steps"):
        raise ValueError(f"expected 'steps' or 'no', found {strategy!r}: give eval_steps")
    steps = steps or (values.get("logging_steps") if strategy else None)
    return {} if steps is None else {"eval_every": int(steps) if steps == int(steps) else steps}


def _seed(values: Mapping[str, Any]) -> dict[str, Any]:
    seed = values["data_seed"]
    if seed is None or seed == values.get("seed", seed):
        return {} if seed is None else {"seed": seed}
    raise ValueError(f"expected the seed, {values['seed']}, found {seed}: one seed serves for rows and adapters")


def _track(values: Mapping[str, Any]) -> dict[str, Any]:
    names = values["report_to"]
    names = [names] if isinstance(names, str) else list(names or [])
    return {} if names in ([], ["none"]) else {"track": names}


# What takes more than another name; each is called with all values.
CONVERTED: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "bf16": _compute_dtype,
    "data_seed": _seed,
    "eval_steps": _eval_every,
    "eval_strategy": _eval_every,
    "evaluation_strategy": _eval_every,
    "fp16": _compute_dtype,
    "gradient_checkpointing": _remat,
    "lr_scheduler_type": _schedule,
    "max_steps": _max_steps,
    "num_train_epochs": _epochs,
    "optim": _optimizer,
    "per_device_eval_batch_size": _eval_batch_size,
    "report_to": _track,
    "warmup_ratio": _warmup,
    "warmup_steps": _warmup,
}
