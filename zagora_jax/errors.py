"""The one exception for input that a user can correct."""


class UserError(Exception):
    """Wrong input: the message says where, what was expected, what was found and what to do.

    Commands print it in one piece, without a traceback, and end with exit status 2.
    """


def in_words(error: OSError) -> str:
    """Say which file or device the system refused, and why."""
    reason = error.strerror or str(error) or type(error).__name__
    return reason if error.filename is None else f"{str(error.filename)[:300]}: {reason}"
