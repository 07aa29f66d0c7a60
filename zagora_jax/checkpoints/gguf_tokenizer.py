"""The tokenizer files of a GGUF file's metadata."""

import json
import logging
from typing import Any

from zagora_jax.checkpoints import tokenizer_json
from zagora_jax.checkpoints.gguf_metadata import Metadata
from zagora_jax.checkpoints.tokenizer_json import TokenType
from zagora_jax.errors import UserError

logger = logging.getLogger(__name__)

_MODELS = ("gpt2", "llama")
_TEMPLATE = "tokenizer.chat_template"


def tokenizer_assets(metadata: Metadata, config: dict[str, Any]) -> dict[str, bytes]:
    """Build tokenizer.json, tokenizer_config.json and generation_config.json.

    Args:
        metadata: Of a Llama model.
        config: The content of its config.json.

    Raises:
        UserError: The tokenizer is of a kind that would give other ids than the original.
    """
    contents = {
        "tokenizer.json": _tokenizer(metadata),
        "tokenizer_config.json": _tokenizer_config(metadata, config),
        "generation_config.json": _generation_config(metadata, config),
    }
    return {
        name: (json.dumps(content, ensure_ascii=False, indent=2) + "\n").encode() for name, content in contents.items()
    }


def _tokenizer(metadata: Metadata) -> dict[str, Any]:
    model = metadata.get("tokenizer.ggml.model", str)
    if model not in _MODELS:
        raise UserError(
            f"{metadata.path}: tokenizer.ggml.model {model!r} is not supported; those of Llama models are "
            f"{' and '.join(_MODELS)}."
        )
    tokens, types = _vocabulary(metadata)
    if metadata.token_id("eos") is None:
        raise UserError(f"{metadata.path} has no metadata entry tokenizer.ggml.eos_token_id.")
    if model == "gpt2":
        return _byte_level(metadata, tokens, types)
    return _sentencepiece(metadata, tokens, types)


def _sentencepiece(metadata: Metadata, tokens: list[str], types: list[int]) -> dict[str, Any]:
    scores = metadata.items("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise UserError(f"{metadata.path}: {len(tokens)} tokens have {len(scores)} tokenizer.ggml.scores.")
    unknown = _unknown_id(metadata)
    return tokenizer_json.sentencepiece_bpe(
        tokens,
        types,
        scores,
        unknown=None if unknown is None else tokens[unknown],
        add_prefix_space=metadata.get("tokenizer.ggml.add_space_prefix", bool, True),
        prefix_after_special=True,  # as llama.cpp does
        template=_template(metadata, tokens, add_bos=True),
    )


def _byte_level(metadata: Metadata, tokens: list[str], types: list[int]) -> dict[str, Any]:
    pre_tokenizer = metadata.get("tokenizer.ggml.pre", str, "default")
    if pre_tokenizer not in tokenizer_json.PRE_TOKENIZERS:
        raise UserError(
            f"{metadata.path}: tokenizer.ggml.pre {pre_tokenizer!r} is not supported; known are "
            f"{', '.join(tokenizer_json.PRE_TOKENIZERS)}. Use the model's safetensors files and tokenizer.json."
        )
    if pre_tokenizer == "default":
        logger.warning(
            "%s does not say how its tokenizer splits text (tokenizer.ggml.pre is missing or 'default'): some texts "
            "may get other ids than the original model's. A file made by a newer llama.cpp says it.",
            metadata.path,
        )
    merges = metadata.items("tokenizer.ggml.merges", str)
    known = set(tokens)
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not space or not {left, right, left + right} <= known:
            raise UserError(f"{metadata.path}: the merge {merge!r} does not join two tokens into a third.")
    template = _template(metadata, tokens, add_bos=pre_tokenizer in tokenizer_json.WHOLE_PIECES_FIRST)
    return tokenizer_json.byte_level_bpe(tokens, types, merges, pre_tokenizer, template)


def _vocabulary(metadata: Metadata) -> tuple[list[str], list[int]]:
    tokens = metadata.items("tokenizer.ggml.tokens", str)
    types = metadata.items("tokenizer.ggml.token_type", int, [TokenType.NORMAL.value] * len(tokens))
    if not tokens or len(types) != len(tokens):
        raise UserError(f"{metadata.path}: {len(tokens)} tokenizer.ggml.tokens have {len(types)} types.")
    first_ids: dict[str, int] = {}
    for number, token in enumerate(tokens):
        if first_ids.setdefault(token, number) != number:
            raise UserError(f"{metadata.path}: the token {token!r} has two ids, {first_ids[token]} and {number}.")
    return tokens, types


def _unknown_id(metadata: Metadata) -> int | None:
    named, (_, types) = metadata.token_id("unknown"), _vocabulary(metadata)
    return types.index(TokenType.UNKNOWN) if named is None and TokenType.UNKNOWN in types else named


def _template(metadata: Metadata, tokens: list[str], add_bos: bool) -> dict[str, Any]:
    bos = metadata.token_id("bos")
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", bool, add_bos)
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", bool, False)
    return tokenizer_json.bos_template(tokens, bos if add_bos else None, metadata.token_id("eos") if add_eos else None)


def _tokenizer_config(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata.get("tokenizer.ggml.tokens", list)
    named = {
        "bos_token": metadata.token_id("bos"),
        "eos_token": metadata.token_id("eos"),
        "unk_token": _unknown_id(metadata),
        "pad_token": metadata.token_id("padding"),
    }
    templates = {"default": metadata.get(_TEMPLATE, str)} if _TEMPLATE in metadata else {}
    templates |= {
        key.removeprefix(f"{_TEMPLATE}."): metadata.get(key, str)
        for key in metadata.entries
        if key.startswith(f"{_TEMPLATE}.")
    }
    template: Any = [{"name": name, "template": text} for name, text in templates.items()]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: tokens[number] for name, number in named.items() if number is not None},
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        **({"chat_template": templates["default"] if set(templates) == {"default"} else template} if templates else {}),
    }


def _generation_config(metadata: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Name every token that ends a text: that of the text, and that of a turn or message where it is another."""
    ends = [number for token in ("eos", "eot", "eom") if (number := metadata.token_id(token)) is not None]
    ends = list(dict.fromkeys(ends))
    content = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "pad_token_id": config["pad_token_id"],
    }
    return {key: value for key, value in content.items() if value is not None}
