"""What goes wrong between ranks. Starting all of them again may help, so neither is a `ValueError`."""


class RendezvousError(RuntimeError):
    """The ranks did not come together; the text says what to do."""


class RankLostError(RuntimeError):
    """A rank did not do its part; the text says so, and that this one cannot go on."""
