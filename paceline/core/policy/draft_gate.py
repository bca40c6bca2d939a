"""Whether a draft is used at all."""

from __future__ import annotations


class DraftGate:
    """Whether a draft pays: what a step commits beyond the token that it would have drawn anyway.

    A draft that brings less than `least` tokens per step and request is *paused*, and *tried* again after some steps:
    for as long as it takes a hopeful average to fall, and after twice as many steps each time that this was in vain. It
    has to bring more than `RESUME` to be as good as new.
    """

    PRIOR_ACCEPTED = 1.0
    PAUSE_BELOW = 0.05
    """What a draft worker has to bring: others may have a use for it."""
    PAUSE_LOCAL_BELOW = -0.05
    """And one in the target's process, of which all that it takes is counted: nothing. Lookups find nothing for long,
    at next to no cost, and then much at once."""
    RESUME_ABOVE = 0.15
    LEARNING_RATE = 0.1
    MIN_PAUSE_STEPS = 32
    MAX_PAUSE_STEPS = 4096
    """In steps."""

    def __init__(self, least: float | None = None) -> None:
        """None: `PAUSE`."""
        self.pause_below = self.PAUSE_BELOW if least is None else least
        self.paused = self.probing = False
        self._accepted_average = self.PRIOR_ACCEPTED
        self._pause_steps = self.MIN_PAUSE_STEPS
        self._pause_left = 0

    @property
    def pays(self) -> bool:
        return not (self.paused or self.probing)

    def observe(self, accepted: float) -> None:
        """A step committed so many guesses of each request that the draft drafts for; of a paused one, none."""
        if self.paused:
            self._pause_left -= 1
            if self._pause_left <= 0:
                self.paused, self.probing, self._accepted_average = False, True, self.RESUME_ABOVE
            return
        self._accepted_average += self.LEARNING_RATE * (accepted - self._accepted_average)
        if self._accepted_average > self.RESUME_ABOVE:
            self.probing, self._pause_steps = False, self.MIN_PAUSE_STEPS
        elif self._accepted_average < self.pause_below:
            self.paused, self.probing, self._pause_left = True, False, self._pause_steps
            self._pause_steps = min(2 * self._pause_steps, self.MAX_PAUSE_STEPS)
