"""The tokenizer of a checkpoint: transformers' fast tokenizer, out of files alone, without remote code and torch."""

import json
import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sentencepiece import sentencepiece_model_pb2

from zagora_jax.checkpoints.checkpoint import Checkpoint
from zagora_jax.checkpoints.huggingface import TEMPLATE_DIRECTORY, TOKENIZER_FILES
from zagora_jax.checkpoints.json_files import parse_json_object
from zagora_jax.checkpoints.tokenizer_json import (
    TokenType,
    as_unigram,
    bos_template,
    sentencepiece_bpe,
    with_normalizer,
)
from zagora_jax.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_HOW_TO_SAVE_JSON = "save its tokenizer.json once: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"


def load_tokenizer(checkpoint: Checkpoint) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of `checkpoint` and check that it fits the model.

    tokenizer.json is read as it stands, whatever class the config names; a folder that has a SentencePiece
    tokenizer.model alone gets the tokenizer.json that it stands for.

    Raises:
        UserError: There is no tokenizer, it is of an unsupported kind, or has an id without an embedding row.
    """
    files = {
        name: data
        for name, data in checkpoint.assets.items()
        if name in TOKENIZER_FILES or name.startswith(f"{TEMPLATE_DIRECTORY}/")
    }
    config = _read_json(files, "tokenizer_config.json", checkpoint)
    config = {key: value for key, value in config.items() if key not in ("auto_map", "tokenizer_class")}
    if config.get("chat_template") is None:  # where older processors of transformers keep it; chat_template.jinja wins
        config["chat_template"] = _read_json(files, "chat_template.json", checkpoint).get("chat_template")
    if "tokenizer.json" not in files:
        if "tokenizer.model" not in files:
            raise UserError(
                f"{checkpoint.path} holds no tokenizer: looked for tokenizer.json and tokenizer.model. "
                "Copy them from the model's source."
            )
        source = f"{checkpoint.path}: tokenizer.model"
        content, special_tokens = _convert_sentencepiece(files["tokenizer.model"], config, source)
        files["tokenizer.json"] = json.dumps(content).encode()
        config = special_tokens | config
    files["tokenizer_config.json"] = json.dumps(config).encode()
    tokenizer = _load(files, checkpoint)
    embedding = checkpoint.tensors.get("model.embed_tokens.weight")
    if embedding is not None:
        check_tokenizer(tokenizer, embedding.shape[0], source=_source_of_last_token(tokenizer, checkpoint))
    _complete_special_tokens(tokenizer, checkpoint)
    _warn_of_mismatch(tokenizer, checkpoint)
    return tokenizer


def check_tokenizer(tokenizer: "PreTrainedTokenizerBase", vocab_rows: int, source: str = "the tokenizer") -> None:
    """Check that every token has an embedding; rows beyond the tokenizer's tokens are usual.

    Args:
        tokenizer: Any tokenizer.
        vocab_rows: Rows of the embedding.
        source: Names the tokenizer in errors.

    Raises:
        UserError: A token id is not below `vocab_rows`.
    """
    beyond = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= vocab_rows)
    if beyond:
        number, token = beyond[-1]
        raise UserError(
            f"{source}: token id {number} >= embedding rows {vocab_rows} ({len(beyond)} tokens lie beyond, the last is "
            f"{token!r}). Use the tokenizer that belongs to the model, or remove the tokens that were added to it."
        )


def _load(files: dict[str, bytes], checkpoint: Checkpoint) -> "PreTrainedTokenizerBase":
    from transformers import PreTrainedTokenizerFast  # here, since the import takes more than a second

    with tempfile.TemporaryDirectory() as directory:
        for name, data in files.items():
            path = Path(directory, name)
            try:
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(data)
            except OSError as error:
                raise UserError(f"{path}: a temporary file cannot be written: {error.strerror or error}") from error
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
            tokenizer("")  # only now is a model_max_length of another type noticed
        # The library raises whatever its parsers meet, bare Exception included, and panics of Rust, which are none.
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            reason = str(error).replace(directory, str(checkpoint.path))
            raise UserError(f"{checkpoint.path}: the tokenizer cannot be loaded: {reason:.500}") from error
    if not isinstance(tokenizer.chat_template, str | dict | None):
        raise UserError(
            f"{checkpoint.path}: tokenizer_config.json: chat_template: expected a text or a list of named templates, "
            f"found {type(tokenizer.chat_template).__name__}"
        )
    tokenizer.name_or_path = tokenizer.init_kwargs["name_or_path"] = checkpoint.name
    return tokenizer


def _convert_sentencepiece(data: bytes, config: dict[str, Any], source: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Turn a SentencePiece model into the tokenizer.json that gives the same ids, and name its special tokens.

    Like transformers, take `legacy` behaviour where tokenizer_config.json does not say.
    """
    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    try:
        proto.ParseFromString(data)
    except Exception as error:  # protobuf's DecodeError; protobuf is no dependency of ours
        raise UserError(
            f"{source} is no SentencePiece model (Llama 3's, of the same name, lists tiktoken ranks): "
            "tokenizer.json is needed beside it."
        ) from error
    is_unigram = proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM
    if not is_unigram and proto.trainer_spec.model_type != proto.trainer_spec.BPE:
        raise UserError(f"{source} is a SentencePiece model of another kind than BPE or unigram: {_HOW_TO_SAVE_JSON}")
    normalizer = proto.normalizer_spec
    if not normalizer.escape_whitespaces or proto.trainer_spec.treat_whitespace_as_suffix:
        raise UserError(f"{source} writes spaces otherwise than as \u2581 before words: {_HOW_TO_SAVE_JSON}")

    tokens = [piece.piece for piece in proto.pieces]
    if not tokens or not all(isinstance(token, str) for token in tokens):  # protobuf gives bytes for broken UTF-8
        raise UserError(f"{source} is damaged: it has no pieces, or some that are no text. Download it again.")
    types = [piece.type for piece in proto.pieces]

    def special(name: str, kind: TokenType, default: str) -> int | None:
        text = config.get(f"{name}_token") or default
        text = text["content"] if isinstance(text, dict) else text
        return tokens.index(text) if text in tokens else (types.index(kind) if kind in types else None)

    if is_unigram and (TokenType.UNUSED in types or len(set(tokens)) < len(tokens)):
        raise UserError(f"{source} has pieces that are never used, or that stand twice: {_HOW_TO_SAVE_JSON}")
    unknown = special("unk", TokenType.UNKNOWN, proto.trainer_spec.unk_piece)
    bos = special("bos", TokenType.CONTROL, proto.trainer_spec.bos_piece)
    eos = special("eos", TokenType.CONTROL, proto.trainer_spec.eos_piece)
    legacy = config.get("legacy")
    content = sentencepiece_bpe(
        tokens,
        types,
        [piece.score for piece in proto.pieces],
        unknown=None if unknown is None else tokens[unknown],
        add_prefix_space=normalizer.add_dummy_prefix and config.get("add_prefix_space") is not False,
        prefix_after_special=legacy is None or bool(legacy),
        template=bos_template(
            tokens,
            bos if config.get("add_bos_token") is not False else None,
            eos if config.get("add_eos_token") is True else None,
        ),
    )
    if is_unigram:
        if unknown is None:
            raise UserError(f"{source} is damaged: it has no unknown piece. Download it again.")
        content = as_unigram(content, types, [piece.score for piece in proto.pieces], unknown)
    content = with_normalizer(
        content, normalizer.precompiled_charsmap, remove_extra_spaces=normalizer.remove_extra_whitespaces
    )
    numbers = {"unk_token": unknown, "bos_token": bos, "eos_token": eos}
    return content, {name: tokens[number] for name, number in numbers.items() if number is not None}


def _source_of_last_token(tokenizer: "PreTrainedTokenizerBase", checkpoint: Checkpoint) -> str:
    """Name the file that brings in the token with the highest id."""
    vocabulary = tokenizer.get_vocab()
    last = max(vocabulary, key=vocabulary.__getitem__, default="")
    for name in ("added_tokens.json", "tokenizer_config.json"):
        content = _read_json(checkpoint.assets, name, checkpoint)
        if last in content or str(vocabulary.get(last)) in content.get("added_tokens_decoder", {}):
            return f"{checkpoint.path}: {name}"
    return f"{checkpoint.path}: {'tokenizer.json' if 'tokenizer.json' in checkpoint.assets else 'tokenizer.model'}"


def _complete_special_tokens(tokenizer: "PreTrainedTokenizerBase", checkpoint: Checkpoint) -> None:
    """Take from config.json the BOS and EOS that the tokenizer's files do not name."""
    for name in ("bos", "eos"):
        configured = checkpoint.config.get(f"{name}_token_id")
        number = configured[0] if isinstance(configured, list) and configured else configured
        if getattr(tokenizer, f"{name}_token") is None and type(number) is int and 0 <= number < len(tokenizer):
            token = tokenizer.convert_ids_to_tokens(number)
            setattr(tokenizer, f"{name}_token", token)
            logger.warning(
                "%s: the tokenizer's files name no %s token; config.json's %r is used.", checkpoint.path, name, token
            )


def _warn_of_mismatch(tokenizer: "PreTrainedTokenizerBase", checkpoint: Checkpoint) -> None:
    """Warn where config and tokenizer name different tokens: the tokenizer's are used for data."""
    for key in ("bos_token_id", "eos_token_id"):
        configured, own = checkpoint.config.get(key), getattr(tokenizer, key)
        accepted = configured if isinstance(configured, list) else [configured]
        if configured is not None and own is not None and own not in accepted:
            logger.warning(
                "%s: config.json says %s %s, the tokenizer (tokenizer_config.json) says %s. The tokenizer's is used.",
                checkpoint.path,
                key,
                configured,
                own,
            )


def _read_json(files: Any, name: str, checkpoint: Checkpoint) -> dict[str, Any]:
    return parse_json_object(files[name], f"{checkpoint.path}: {name}") if name in files else {}
