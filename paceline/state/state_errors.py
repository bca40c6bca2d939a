"""What can go wrong with shared state.

StateError             the state cannot be used at all; the message says what to do
└── StateLostError     it does not answer now; what it knew can be told to it again later
"""


class StateError(Exception):
    """Shared state cannot be used. One line, fit to be shown to whoever started the service."""


class StateUnavailableError(StateError):
    """Redis does not answer. Background work waits for its return (`RedisAvailability`); requests go on without it."""
