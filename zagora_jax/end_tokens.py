"""The tokens that end an answer: what training teaches, what generation stops at and what an export says."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zagora_jax.base import BaseModel
from zagora_jax.checkpoints.json_files import parse_json_object
from zagora_jax.data.masks import end_of_turn
from zagora_jax.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONFIGS = ("config.json", "generation_config.json")


def end_tokens(base: BaseModel) -> frozenset[int]:
    """Return the ids that end a generation.

    They are those that training teaches, and what the model's configurations list.

    Raises:
        UserError: what a configuration lists is no token.
    """
    assert base.checkpoint is not None  # synthetic models have no tokenizer
    ids = set(taught_ends(base.tokenizer()))
    for name in CONFIGS:
        source = f"{base.checkpoint.path / name}"
        ids.update(_listed(parse_json_object(base.checkpoint.assets.get(name, b"{}"), source), source))
    return frozenset(ids)


def taught_ends(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the ids that training ends rows and turns with: the tokenizer's EOS and that of its chat template."""
    ends = (tokenizer.eos_token_id, end_of_turn(tokenizer))
    return list(dict.fromkeys(end for end in ends if end is not None))


def corrected(content: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase", source: str) -> dict[str, Any]:
    """Return the fields of a configuration that contradict the training, with the values that do not.

    A list of ends that lacks the tokenizer's own is another tokenizer's, and replaced; any other is added to.

    Args:
        content: of config.json or generation_config.json.
        tokenizer: that the model was trained with.
        source: names the file in errors.
    """
    changes: dict[str, Any] = {}
    taught, listed = taught_ends(tokenizer), _listed(content, source)
    if not set(taught) <= set(listed):
        kept = listed if tokenizer.eos_token_id in listed else []
        ends = list(dict.fromkeys([*kept, *taught]))
        changes["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    own = tokenizer.bos_token_id
    if own is not None and content.get("bos_token_id") not in (None, own):
        changes["bos_token_id"] = own
    return changes


def _listed(content: Mapping[str, Any], source: str) -> list[int]:
    listed = content.get("eos_token_id")
    listed = listed if isinstance(listed, list) else [listed]
    if not all(token is None or type(token) is int for token in listed):
        raise UserError(f"{source}: eos_token_id: expected a whole number or a list of them, found {listed}")
    return [token for token in listed if token is not None]
