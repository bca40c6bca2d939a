"""The draft gate: whether a draft is used at all."""

from __future__ import annotations

from collections.abc import Callable

from paceline.engine.drafted_request import DraftedRequest


class DraftGate:
    """Pauses one draft while it does not pay, judged by all its requests together.

    A draft pays by the draft tokens that a step accepts per request, less the tokens that drafting costs. If the moving
    average falls below `pause_below`, the draft's requests are paused: the draft receives their commits, many
    at a time, and computes nothing. A request whose own average is above `pause_below` stays unpaused.

    After some steps the draft is probed: the paused request with the best average, the *probe*, is resumed. If the
    average rises above `RESUME_ABOVE`, all requests are resumed; if it falls again, the next pause is twice as long.
    """

    PRIOR_ACCEPTED = 1.0
    PAUSE_BELOW = 0.05
    """For a draft worker, whose time other targets may use."""
    PAUSE_LOCAL_BELOW = -0.05
    """For a draft in the target's process, whose whole cost is measured. Lookups may find nothing for long, at next to
    no cost, and then many tokens."""
    RESUME_ABOVE = 0.15
    LEARNING_RATE = 0.1
    MIN_PAUSE_STEPS = 32
    MAX_PAUSE_STEPS = 4096

    def __init__(self, on_change: Callable[[DraftedRequest], None], pause_below: float | None = None) -> None:
        """`on_change` is called after a request was paused or resumed. `pause_below`: default `PAUSE_BELOW`."""
        self.requests: dict[int, DraftedRequest] = {}
        self._on_change = on_change
        self._pause_below = self.PAUSE_BELOW if pause_below is None else pause_below
        self._paused = self._probing = False
        self._average = self.PRIOR_ACCEPTED
        self._pause_steps = self.MIN_PAUSE_STEPS
        self._pause_left = 0
        self._judged = False
        """Whether any step was judged."""
        self._probe: DraftedRequest | None = None
        self._accepted: list[tuple[DraftedRequest, int]] = []

    @property
    def pays(self) -> bool:
        return not (self._paused or self._probing)

    def add(self, request: DraftedRequest) -> None:
        """The draft has been opened for this request, unpaused. A paused draft pauses it; it is the next probe.

        A request that another target had keeps its average with its first draft here, and so may stay unpaused. Before
        the first step is judged, the averages of the requests judge the draft.
        """
        self.requests[request.key] = request
        request.paused = request.draft_started = False
        before = request.generation_request.accepted_average if len(request.stats.drafts) <= 1 else None
        prior = self.PRIOR_ACCEPTED if self.pays or not self._judged else self._pause_below
        request.accepted_average = prior if before is None else before
        if before is not None:
            request.stats.accepted_average = before  # for the next target, if this one is lost before its draft sends
        if not self._judged:
            self._average = sum(each.accepted_average for each in self.requests.values()) / len(self.requests)
            self._paused, self._pause_left = self._average < self._pause_below, self._pause_steps
        self._update_pauses()

    def remove(self, key: int) -> None:
        self.requests.pop(key, None)

    def record_accepted(self, request: DraftedRequest, accepted: int) -> None:
        """The step accepted this many of the draft's tokens for one request."""
        self._accepted.append((request, accepted))

    def end_step(self, lost: float = 0.0) -> None:
        """Judge the draft after a step. `lost`: tokens that drafting cost each drafted request.

        A request counts once its draft has sent something since it was opened or resumed.
        """
        recorded, self._accepted = self._accepted, []
        gains = [(request, accepted - lost) for request, accepted in recorded if request.draft_started]
        for request, gain in gains:
            request.accepted_average += self.LEARNING_RATE * (gain - request.accepted_average)
            request.stats.accepted_average = request.accepted_average
        counted = [gain for request, gain in gains if self._probe in (None, request)]
        if self._paused and recorded:
            self._continue_pause()
        elif counted and not self._paused:
            self._observe(sum(counted) / len(counted))
        self._judged |= bool(recorded)
        self._choose_probe()
        self._update_pauses()

    def _continue_pause(self) -> None:
        self._pause_left -= 1
        if self._pause_left <= 0:
            self._paused, self._probing, self._average = False, True, self.RESUME_ABOVE

    def _observe(self, gain: float) -> None:
        self._average += self.LEARNING_RATE * (gain - self._average)
        if self._average > self.RESUME_ABOVE:
            self._probing, self._pause_steps = False, self.MIN_PAUSE_STEPS
        elif self._average < self._pause_below:
            self._paused, self._probing, self._pause_left = True, False, self._pause_steps
            self._pause_steps = min(2 * self._pause_steps, self.MAX_PAUSE_STEPS)

    def _choose_probe(self) -> None:
        if not self._probing:
            self._probe = None
        elif self._probe is None or self._probe.key not in self.requests:
            paused = (request for request in self.requests.values() if request.paused)
            self._probe = max(paused, key=lambda request: request.accepted_average, default=None)

    def _update_pauses(self) -> None:
        for request in self.requests.values():
            exempt = request.accepted_average > self._pause_below
            paused = not (self.pays or exempt or request is self._probe)
            if request.paused is not paused:
                request.paused, request.draft_started = paused, False
                self._on_change(request)
