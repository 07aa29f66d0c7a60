"""The sizes that models were released in, found by what people call them."""

import re

from zagora_jax.checkpoints.known_models import KNOWN_MODELS
from zagora_jax.errors import UserError

# Of sizes with one name in several families, the first of these is meant.
PREFERRED = ("llama-3.3", "llama-3.2", "llama-3.1", "llama-2", "qwen3", "qwen2.5", "mistral")

_SIZE = re.compile(r"(?:(.+)-)?(\d+(?:\.\d+)?)([bm])")


def find_size(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the known model that a text names ("70B", "llama-3.1-8b"), and what was assumed.

    Raises:
        UserError: no such size was released; names the nearest ones.
    """
    plain = _plain(text)
    if plain in KNOWN_MODELS:
        return plain, ()
    size = _SIZE.fullmatch(plain)
    if size is None:
        raise UserError(f"--model-size {text}: expected a size (70B) or a model (llama-3.1-8b); known: {_all()}")
    family, billions = size[1], _number(size)
    of_size = [name for name in KNOWN_MODELS if _billions(name) == billions]
    if family is None:
        if of_size:
            first = min(of_size, key=_preference)
            others = ", ".join(name for name in of_size if name != first)
            return first, (f"{text} was taken for {first}" + (f"; others of this size: {others}" if others else ""),)
        nearest = sorted(KNOWN_MODELS, key=lambda name: abs(_billions(name) - billions))
        sizes = list(dict.fromkeys(f"{_billions(name):g}B ({name})" for name in nearest))[:4]
        raise UserError(f"--model-size {text}: no known model has that size; the nearest are {', '.join(sizes)}")
    raise UserError(f"--model-size {text}: {_never_released(family, billions, of_size)}")


def unreleased(name: str) -> str | None:
    """Say which sizes there are of a family that never had the size that a model's name asks for.

    None where the name does not say a family and a size, or was released.
    """
    plain = _plain(name.rpartition("/")[2])
    size = _SIZE.fullmatch(plain)
    if plain in KNOWN_MODELS or size is None or size[1] not in set(map(_family, KNOWN_MODELS)):
        return None
    billions = _number(size)
    return _never_released(size[1], billions, [known for known in KNOWN_MODELS if _billions(known) == billions])


def _plain(text: str) -> str:
    """Return a name as KNOWN_MODELS spells names."""
    plain = re.sub(r"[\s_/]+", "-", text.strip().lower())
    plain = re.sub(r"^(?:meta-llama-(?=llama|meta)|qwen-(?=qwen)|mistralai-)", "", plain).removeprefix("meta-")
    plain = re.sub(r"^llama(?=\d)", "llama-", re.sub(r"^qwen-(?=\d)", "qwen", plain))
    return re.sub(r"-(?:instruct|chat|base|it|hf)$", "", plain)


def _number(size: re.Match[str]) -> float:
    """Return the billions that _SIZE has found."""
    return float(size[2]) / (1000 if size[3] == "m" else 1)


def _family(name: str) -> str:
    return name.rpartition("-")[0]


def _never_released(family: str, billions: float, of_size: list[str]) -> str:
    relatives = [name for name in KNOWN_MODELS if _family(name) == family]
    same = f"; {billions:g}B are {', '.join(sorted(of_size, key=_preference))}" if of_size else ""
    if relatives:
        sizes = sorted(relatives, key=lambda name: abs(_billions(name) - billions))
        return f"no {family} of {billions:g}B was released; the nearest are {', '.join(sizes[:3])}{same}"
    families = ", ".join(dict.fromkeys(map(_family, KNOWN_MODELS)))
    return f"no model family {family!r} is known; known: {families}{same}"


def _billions(name: str) -> float:
    size = name.rpartition("-")[2]
    return float(size[:-1]) / (1000 if size.endswith("m") else 1)


def _preference(name: str) -> int:
    family = _family(name)
    return PREFERRED.index(family) if family in PREFERRED else len(PREFERRED)


def _all() -> str:
    return ", ".join(KNOWN_MODELS)
