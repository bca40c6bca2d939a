"""The error of a grammar."""


class GrammarError(ValueError):
    """A grammar that cannot be used; the message says why."""
