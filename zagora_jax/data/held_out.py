"""Rows held out for evaluation, chosen by what they say.

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
