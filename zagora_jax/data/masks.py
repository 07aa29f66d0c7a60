"""From rendered text to tokens and the mask of those that are supervised."""

import bisect
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from zagora_jax.data.chat import Rendered, name_of
from zagora_jax.data.sources import Location
from zagora_jax.errors import UserError


class Encoder:
    """Turns rendered rows into tokens and masks.

    Supervised are the tokens that hold text of a learned span, and the end token after it: the one that the
    chat template wrote, or, outside of chat, the tokenizer's end-of-sequence token, which is appended. Text that is not
    a chat also gets the tokens that the tokenizer begins a sequence with (once, if the text has them already). The
    first token of a row has nothing before it and is never supervised.

    Padding is not looked at: it is known by position, so a pad token that equals the end token does no harm.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sequence_length: int):
        """Prepares for one tokenizer.

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
        # No token is longer than the longest of the vocabulary: text past this many characters cannot be reached.
        longest = max(map(len, tokenizer.get_vocab()))
        self._reach = (sequence_length + 256) * longest

    def encode(self, rows: Sequence[Rendered], locations: Sequence[Location]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Encodes rows together.

        Returns:
            Tokens int32[n] and supervised bool[n] of each row; n = 0 for a row without text.

        Raises:
            UserError: a chat template writes no end token after an assistant's turn.
        """
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
        return [
            self._finish(row, location, ids, offsets)
            for row, location, ids, offsets in zip(
                rows, locations, encoded["input_ids"], encoded["offset_mapping"], strict=True
            )
        ]

    def _finish(
        self, row: Rendered, location: Location, ids: list[int], offsets: list[tuple[int, int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        supervised = np.zeros(len(ids), bool)
        starts = [start for start, _ in offsets]
        ends = [end for _, end in offsets]
        for start, end in row.spans:
            first = bisect.bisect_right(ends, start)
            last = bisect.bisect_left(starts, end)
            if first < last and starts[first] < start and row.text[start : ends[first]].isspace():
                first += 1  # white space of the prompt that swallowed some of the answer's
            if row.chat:
                last = max(last, self._after_end_token(row, location, ids, starts, end))
            supervised[first:last] = True
        tokens = np.asarray(ids, np.int32)
        if ids and not row.chat:
            tokens, supervised = self._enclose(tokens, supervised)
        supervised[:1] = False
        return tokens, supervised

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

    def _enclose(self, tokens: np.ndarray, supervised: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Puts the tokenizer's begin tokens before, and its end token after, where they are not there already."""
        begin = np.asarray(self._begin, np.int32)
        if not np.array_equal(tokens[: len(begin)], begin):
            tokens = np.concatenate([begin, tokens])
            supervised = np.concatenate([np.zeros(len(begin), bool), supervised])
        if tokens[-1] != self._end:
            tokens = np.append(tokens, np.int32(self._end))
            supervised = np.append(supervised, True)
        return tokens, supervised


def _beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that the tokenizer puts before a text, such as [bos]; empty if it adds none."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    for count in range(len(full) - len(bare) + 1):
        if full[count : count + len(bare)] == bare:
            return full[:count]
    return []
