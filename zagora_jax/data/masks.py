"""From rendered text to tokens, and how much each of them counts in the loss."""

import bisect
import sys
from collections.abc import Iterable, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from zagora_jax.data.chat import Rendered, name_of, render
from zagora_jax.data.rows import Conversation, TokenRow
from zagora_jax.data.sources import Location
from zagora_jax.data.turns import Turn
from zagora_jax.errors import UserError


class Encoder:
    """Turns rendered rows into tokens and the weight of each in the loss.

    Supervised are the tokens that hold text of a learned span, and the end token after it: the one that the
    chat template wrote, or, outside of chat, the tokenizer's end-of-sequence token, which is appended. Text that is not
    a chat also gets the tokens that the tokenizer begins a sequence with (once, if the text has them already). The
    first token of a row has nothing before it and is never supervised.

    Padding is not looked at: it is known by position, so a pad token that equals the end token does no harm.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sequence_length: int, whole: bool = False):
        """Prepares for one tokenizer; with `whole`, text past `sequence_length` tokens is encoded too.

        Raises:
            UserError: the tokenizer cannot tell the characters of its tokens, or has no end-of-sequence token.
        """
        if not tokenizer.is_fast:
            raise UserError(
                f"{name_of(tokenizer)}: expected a tokenizer.json, found a tokenizer that does not tell token offsets"
            )
        if tokenizer.eos_token_id is None:
            raise UserError(
                f"{name_of(tokenizer)}: the tokenizer has no end-of-sequence token; name it in tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._end = int(tokenizer.eos_token_id)
        self._begin = _beginning(tokenizer)
        self._added = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
        vocabulary = tokenizer.get_vocab()
        self._last = max(vocabulary.values())
        # No token is longer than the longest of the vocabulary: text past this many characters cannot be reached.
        self._reach = sys.maxsize if whole else (sequence_length + 256) * max(map(len, vocabulary))

    def encode(
        self, rows: Sequence[Rendered | TokenRow], locations: Sequence[Location]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Encodes rows together.

        Returns:
            Tokens int32[n] and weights float32[n] of each row, 0 where not supervised; n = 0 for a row without text.

        Raises:
            UserError: a chat template writes no end token after an assistant's turn, or a row of tokens has one that
                the tokenizer does not have.
        """
        encoded = iter(self._encode([row for row in rows if isinstance(row, Rendered)]))
        return [
            self._check(row, location) if isinstance(row, TokenRow) else self._finish(row, location, *next(encoded))
            for row, location in zip(rows, locations, strict=True)
        ]

    def _encode(self, rows: Sequence[Rendered]) -> Iterable[tuple[list[int], list[tuple[int, int]]]]:
        """Token ids of each row, and the characters that each stands for."""
        if not rows:
            return []
        encoded = self._tokenizer(
            [row.text[: self._reach] for row in rows],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)

    def _check(self, row: TokenRow, location: Location) -> tuple[np.ndarray, np.ndarray]:
        if wrong := np.flatnonzero((row.tokens < 0) | (row.tokens > self._last)).tolist():
            raise UserError(
                f"{location}, field input_ids[{wrong[0]}]: expected a token of {name_of(self._tokenizer)}, 0 to "
                f"{self._last}, found {row.tokens[wrong[0]]}; encode the rows with the tokenizer of this model"
            )
        weights = row.weights.copy()
        weights[:1] = 0
        return row.tokens, weights

    def _finish(
        self, row: Rendered, location: Location, ids: list[int], offsets: list[tuple[int, int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        weights = np.zeros(len(ids), np.float32)
        starts = [start for start, _ in offsets]
        ends = [end for _, end in offsets]
        for start, end, weight in row.spans:
            first = bisect.bisect_right(ends, start)
            last = bisect.bisect_left(starts, end)
            if first < last and starts[first] < start and row.text[start : ends[first]].isspace():
                first += 1  # white space of the prompt that swallowed some of the answer's
            if row.chat:
                last = max(last, self._after_end_token(row, location, ids, starts, end))
            weights[first:last] = weight
        tokens = np.asarray(ids, np.int32)
        if ids and not row.chat:
            tokens, weights = self._enclose(tokens, weights, row.spans[-1].weight if row.spans else 0.0)
        weights[:1] = 0
        return tokens, weights

    def _after_end_token(self, row: Rendered, location: Location, ids: list[int], starts: list[int], end: int) -> int:
        """The position after the end token of an answer that ends at character `end`."""
        position = bisect.bisect_left(starts, end)
        while position < len(ids) and ids[position] not in self._added:
            position += 1
        if position < len(ids) and not row.text[end : starts[position]].strip():
            return position + 1
        if len(row.text) > self._reach:  # the end token is past what is encoded
            return len(ids)
        following = row.text[end : end + 20]
        raise UserError(
            f"{location}: the chat template of {name_of(self._tokenizer)} writes no end token "
            f"after the assistant's turn (found {following!r}), so the model would not learn to stop; "
            "correct the template"
        )

    def _enclose(self, tokens: np.ndarray, weights: np.ndarray, weight: float) -> tuple[np.ndarray, np.ndarray]:
        """Puts the tokenizer's begin tokens before, and its end token after, where they are not there already."""
        begin = np.asarray(self._begin, np.int32)
        if not np.array_equal(tokens[: len(begin)], begin):
            tokens = np.concatenate([begin, tokens])
            weights = np.concatenate([np.zeros(len(begin), np.float32), weights])
        if tokens[-1] != self._end:
            tokens = np.append(tokens, np.int32(self._end))
            weights = np.append(weights, np.float32(weight))
        return tokens, weights


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that training teaches to end an answer with in a chat; None without a template that has one."""
    if not tokenizer.chat_template:
        return None
    exchange = Conversation((Turn("user", "Hi"), Turn("assistant", "Hello")))
    place = Location("an exchange of two turns", 1, "row")
    try:
        [(tokens, weights)] = Encoder(tokenizer, 2**16).encode([render(exchange, tokenizer, place)], [place])
    except UserError:
        return None
    return int(tokens[np.flatnonzero(weights)[-1]])


def _beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that the tokenizer puts before a text, such as [bos]; empty if it adds none."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    for count in range(len(full) - len(bare) + 1):
        if full[count : count + len(bare)] == bare:
            return full[:count]
    return []
