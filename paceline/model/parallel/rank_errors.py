"""Failures between ranks. A restart of all ranks may help, so neither is a `ValueError`."""


class RendezvousError(RuntimeError):
    """The ranks did not meet; the text says what to do."""


class RankLostError(RuntimeError):
    """Another rank is gone or too slow, so this rank cannot continue."""
