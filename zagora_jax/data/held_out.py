"""Rows held out for evaluation, and the parts of several sites, chosen by what they say.

The choice depends on a row's content alone: not on its place, its file, its metadata, the seed or the tokenizer. So
equal rows stand on the same side, and rows that are added or moved leave the others where they were.
"""

import hashlib
import json
from typing import Any

from zagora_jax.data.rows import Completion, Conversation, Form, Instruction, PlainText, TokenRow


def is_held_out(form: Form, fraction: float) -> bool:
    """Whether a row is among the `fraction` (0 to 1) of all possible rows that are held out."""
    digest = hashlib.sha256(_content(form)).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def is_in_part(form: Form, part: int, parts: int) -> bool:
    """Whether a row belongs to one of so many parts of the data, counted from 0; independent of what is held out."""
    return int.from_bytes(hashlib.sha256(_content(form)).digest()[8:16], "big") % parts == part


def _content(form: Form) -> bytes:
    match form:
        case TokenRow(tokens):
            return tokens.astype("<i4").tobytes()
        case PlainText(text):
            content: Any = [text]
        case Completion(prompt, completion):
            content = [prompt, completion]
        case Instruction(instruction, given, output):
            content = [instruction, given, output]
        case Conversation(turns, tools):
            content = [[turn.message() for turn in turns], tools]
    return json.dumps(content, sort_keys=True).encode()
