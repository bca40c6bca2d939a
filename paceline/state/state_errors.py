"""Errors of shared state.

StateError                    the state cannot be used at all; the message says what to do
└── StateUnavailableError     Redis does not answer now; the operation can be repeated later
"""

from paceline.launcher import StartError


class StateError(StartError):
    """Shared state cannot be used. The message is one line for the user who starts the service."""


class StateUnavailableError(StateError):
    """Redis does not answer. Background work waits for its return (`RedisAvailability`); requests go on without it."""
