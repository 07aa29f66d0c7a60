"""Tokenizers of other formats written as tokenizer.json, the format of Hugging Face's tokenizers library.

SentencePiece models and GGUF metadata describe the same two kinds of tokenizer: byte-level BPE, as GPT-2's, and
SentencePiece BPE with byte fallback, as Llama 1's. The tokenizers library reads https://huggingface.co/docs/tokenizers.
"""

import base64
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

_SPACE = "\u2581"


class TokenType(IntEnum):
    """Kinds of tokens: SentencePiece's `ModelProto.SentencePiece.Type` and llama.cpp's `llama_token_type` agree."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Pre-tokenisers by llama.cpp's names for them: which text pieces BPE merges within.
# Regular expressions as in the models' own tokenizer.json.
_GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_TEKKEN_REGEX = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


_DIGITS = {"type": "Digits", "individual_digits": True}
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "smollm": [_DIGITS, _split(_GPT2_REGEX)],
    "starcoder": [_DIGITS, _split(_GPT2_REGEX)],
    "gpt-2": [_split(_GPT2_REGEX)],
    "llama-bpe": [_split(_LLAMA3_REGEX)],
    "llama3": [_split(_LLAMA3_REGEX)],
    "llama-v3": [_split(_LLAMA3_REGEX)],
    "smaug-bpe": [_split(_LLAMA3_REGEX)],
    "dbrx": [_split(_LLAMA3_REGEX)],
    "tekken": [_split(_TEKKEN_REGEX)],
    # What llama.cpp does for a model whose pre-tokeniser its converter did not know.
    "default": [
        _split(r"[\p{P}\$\+<=>\^~\|]+"),
        _split(_GPT2_REGEX),
        _split(r"\p{N}+"),
        _split(r"[0-9][0-9][0-9]"),
    ],
}
PRE_TOKENIZERS = tuple(_PRE_TOKENIZERS)
# Those whose models look a whole piece up in the vocabulary before merging, and begin a text with BOS by default.
WHOLE_PIECES_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})


def byte_level_bpe(
    tokens: Sequence[str], types: Sequence[int], merges: Sequence[str], pre_tokenizer: str, template: dict[str, Any]
) -> dict[str, Any]:
    """Build the tokenizer.json of a byte-level BPE tokenizer.

    Args:
        tokens: Token texts by id, in GPT-2's byte alphabet.
        types: `TokenType` by id.
        merges: Merges in order of rank, each two texts with a space between.
        pre_tokenizer: One of `PRE_TOKENIZERS`.
        template: What `bos_template` returned.
    """
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, types),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*_PRE_TOKENIZERS[pre_tokenizer], byte_level]},
        "post_processor": template,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre_tokenizer in WHOLE_PIECES_FIRST,
            "vocab": {token: number for number, token in enumerate(tokens)},
            # A merge may begin with a space only as its first character, never consist of it.
            "merges": [[merge[: (cut := merge.index(" ", 1))], merge[cut + 1 :]] for merge in merges],
        },
    }


def sentencepiece_bpe(
    tokens: Sequence[str],
    types: Sequence[int],
    scores: Sequence[float],
    *,
    unknown: str | None,
    add_prefix_space: bool,
    prefix_after_special: bool,
    template: dict[str, Any],
) -> dict[str, Any]:
    """Build the tokenizer.json of a SentencePiece BPE tokenizer with byte fallback.

    Args:
        tokens: Pieces by id.
        types: `TokenType` by id.
        scores: Score by id: of two possible merges, that with the higher score comes first.
        unknown: Text of the unknown token.
        add_prefix_space: Whether a space is put before a text.
        prefix_after_special: Whether it is also put before the text that follows a special token, as tokenizers with
            `legacy` behaviour do.
        template: What `bos_template` returned.
    """
    normalizers: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    pre_tokenizer = None
    if add_prefix_space and prefix_after_special:
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
    elif add_prefix_space:
        pre_tokenizer = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "first", "split": False}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if add_prefix_space:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, types),
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if pre_tokenizer is None else None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": template,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": _merges_by_score(tokens, types, scores),
        },
    }


def as_unigram(content: dict[str, Any], types: Sequence[int], scores: Sequence[float], unknown: int) -> dict[str, Any]:
    """Make of a SentencePiece BPE tokenizer's content that of a unigram language model's (Kudo, arXiv:1804.10959).

    Args:
        content: What `sentencepiece_bpe` returned.
        types: `TokenType` by id.
        scores: Log probability by id.
        unknown: Id of the unknown token.
    """
    vocabulary = [[token, score] for token, score in zip(content["model"]["vocab"], scores, strict=True)]
    byte_fallback = TokenType.BYTE in types
    model = {"type": "Unigram", "unk_id": unknown, "vocab": vocabulary, "byte_fallback": byte_fallback}
    steps = [] if content["pre_tokenizer"] is None else [content["pre_tokenizer"]]
    if byte_fallback:  # a byte stands for what no piece does, never for its own name in a text, which is cut apart
        steps.append(_split("<(?=0x[0-9A-F]{2}>)"))
    return {**content, "model": model, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps} if steps else None}


def with_normalizer(content: dict[str, Any], charsmap: bytes, *, remove_extra_spaces: bool) -> dict[str, Any]:
    """Normalise texts as a SentencePiece model does before anything else.

    Args:
        content: What `sentencepiece_bpe` or `as_unigram` returned.
        charsmap: The model's rules, compiled by SentencePiece; none where empty.
        remove_extra_spaces: Whether spaces at both ends go, and of several together all but one.
    """
    first: list[dict[str, Any]] = []
    if charsmap:
        first.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()})
    if remove_extra_spaces:
        for regex, replacement in ((r"\A +| +\z", ""), (" {2,}", " ")):
            first.append({"type": "Replace", "pattern": {"Regex": regex}, "content": replacement})
    if not first:
        return content
    later = [] if content["normalizer"] is None else content["normalizer"]["normalizers"]
    return {**content, "normalizer": {"type": "Sequence", "normalizers": [*first, *later]}}


def bos_template(tokens: Sequence[str], bos: int | None, eos: int | None) -> dict[str, Any]:
    """Build the post-processor that begins a text with the token `bos` and ends it with `eos`, where given."""
    special = {tokens[number]: number for number in (bos, eos) if number is not None}

    def pieces(sequence: str, type_id: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": sequence, "type_id": type_id}}
        first = [] if bos is None else [{"SpecialToken": {"id": tokens[bos], "type_id": type_id}}]
        last = [] if eos is None else [{"SpecialToken": {"id": tokens[eos], "type_id": type_id}}]
        return [*first, text, *last]

    return {
        "type": "TemplateProcessing",
        "single": pieces("A", 0),
        "pair": pieces("A", 0) + pieces("B", 1),
        "special_tokens": {text: {"id": text, "ids": [number], "tokens": [text]} for text, number in special.items()},
    }


def _added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    """List the tokens that are found in a text before anything else."""
    special_types = (TokenType.CONTROL, TokenType.UNKNOWN)
    return [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in special_types,
        }
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in special_types or kind == TokenType.USER_DEFINED
    ]


def _merges_by_score(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Derive the merges of SentencePiece BPE, which stores scores only.

    SentencePiece joins the neighbours whose joined piece has the best score, so every way to cut a piece into two
    others is a merge of that piece's rank.
    """
    mergeable = {
        token: number
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (TokenType.NORMAL, TokenType.UNUSED)
    }
    merges = [
        (-scores[number], mergeable[token[:cut]], mergeable[token[cut:]])
        for token, number in mergeable.items()
        for cut in range(1, len(token))
        if token[:cut] in mergeable and token[cut:] in mergeable
    ]
    return [(tokens[left], tokens[right]) for _, left, right in sorted(merges)]
