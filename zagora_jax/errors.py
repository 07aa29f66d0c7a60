"""The one exception for input that a user can correct."""


class UserError(Exception):
    """Wrong input: the message says where, what was expected, what was found and what to do.

    Commands print it in one piece, without a traceback, and end with exit status 2.
    """
