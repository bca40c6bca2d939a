"""The drafts of an engine: which draft serves which request, what drafts sent, and whether a step waits for more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from torch import Tensor

from paceline.config import SpeculativeConfig
from paceline.core.growth import Growth
from paceline.drafting.draw_prediction import SAMPLED_DRAFT_SCORE
from paceline.drafting.speculator import Commit, Context, Opening
from paceline.engine.draft_client import DraftClient, PollResult
from paceline.engine.draft_gate import DraftGate
from paceline.engine.draft_schedule import Clock, DraftSchedule
from paceline.engine.drafted_request import OWN_DRAFT_SOURCE, DraftedRequest

DRAFT_RETRY_S = 0.5
"""How often a request without a draft looks for one."""
MAX_IDLE_GATES = 256
"""Gates kept for drafts without requests."""
MAX_HELD_TOKENS = 64
"""So many tokens of a paused request go to its draft at a time: a message for each step costs both machines more."""
MAX_HIDDEN_STATES_SENT = 256
"""Most positions of one request whose hidden states a step sends: as many as a step computes, by default."""

GatherHiddenStates = Callable[[int, int, int], Tensor]
"""(number of a request, start, stop) → hidden states of these positions, [positions, layers, hidden size]."""


class DraftManager:
    """The drafts of one engine."""

    def __init__(
        self,
        draft_client: DraftClient,
        lookup_clients: Sequence[DraftClient],
        config: SpeculativeConfig,
        schedule: DraftSchedule,
        vocabulary_size: int,
        clock: Clock,
        gather: GatherHiddenStates | None = None,
    ) -> None:
        """`draft_client` finds each request a draft; those of lookups draft for every request. `gather`: None: no
        hidden states are sent.

        Drafts that do not pay are paused, unless the rows need not pay or steps are in lock-step.
        """
        self.received = 0
        """Nodes received since the engine last reset this."""
        self.grafted = 0
        """Those of them that joined a tree."""
        self.waited_s = 0.0
        """Time that steps have waited for growth."""
        self._draft_client = draft_client
        self._lookup_clients = lookup_clients
        self._config = config
        self._schedule = schedule
        self._vocabulary_size = vocabulary_size
        self._clock = clock
        self._gather = gather
        self._gated = config.row_budget and config.draft_schedule != "lockstep"
        self._sampled_drafts = config.strategy.sampled_drafts
        self._gates: dict[str, DraftGate] = {}
        """By draft; empty unless gated."""
        self._gate_of: dict[int, DraftGate] = {}
        """By request with a gated draft."""

    def find_drafts(self, requests: Sequence[DraftedRequest]) -> None:
        """Open a draft for each request that has none and has not looked for one lately."""
        now = self._clock()
        for request in requests:
            if request.speculates and not request.lookups_opened:
                request.lookups_opened = True
                for lookup in self._lookup_clients:
                    lookup.open(self._opening(request), ())
        seeking = [r for r in requests if r.speculates and r.draft is None and r.retry_draft_at <= now]
        for request in seeking:
            request.tree.forget_ids()
            request.hidden_states_sent = 0
            request.held_commits.clear()  # the opening has their tokens
            request.draft = self._draft_client.open(self._opening(request), request.draft_addresses)
            request.retry_draft_at = now + DRAFT_RETRY_S
            if request.draft is not None:
                request.stats.drafts.append(request.draft)
                if self._gated:
                    gate = self._gate_of[request.key] = self._gate_for(request.draft)
                    gate.add(request)
        if seeking:
            self._draft_client.flush()

    def lacking_states(self, request: DraftedRequest, computed: int) -> range:
        """The positions, of the first `computed` ones, whose hidden states a step may send to the request's draft."""
        if not request.draft_active:
            return range(0)
        start, root = request.hidden_states_sent, len(request.tokens) - 1
        return range(start, computed if root - start <= MAX_HIDDEN_STATES_SENT else start + MAX_HIDDEN_STATES_SENT)

    def send_hidden_states(self, request: DraftedRequest, stop: int) -> None:
        """Send the draft the hidden states before `stop`, the root at most, that it lacks.

        After a hit in the prefix cache, a move to another draft or a pause, these are all missing states, up to
        `MAX_HIDDEN_STATES_SENT` positions a step. The root's own come with the commit.
        """
        start = request.hidden_states_sent
        stop = min(stop, start + MAX_HIDDEN_STATES_SENT)
        if self._draft_client.hidden_state_layers and self._gather and request.draft_active and start < stop:
            self._draft_client.context(Context(request.key, start, self._gather(request.key, start, stop)))
            request.hidden_states_sent = stop

    def commit(
        self, request: DraftedRequest, tokens: Sequence[int], accepted: Sequence[int], *, computed: bool = True
    ) -> None:
        """Tell drafts what a step commits, before `DraftedRequest.commit`. A paused draft is told later, many tokens at
        a time.

        `accepted`: the nodes of the first tokens. `computed`: whether the hidden states that the tokens were drawn from
        are there. Drafts get the last tokens of a request, too: some learn from them for other requests.
        """
        if gate := self._gate_of.get(request.key):
            from_draft = [request.tree.sources[node] for node in accepted].count(OWN_DRAFT_SOURCE)
            gate.record_accepted(request, from_draft)
        base = len(request.tokens) - 1
        states = self._states_from(request, base, base + len(tokens)) if computed else None
        commit = Commit(request.key, base, tokens, len(accepted), states)
        request.held_commits.append(commit)
        if not request.paused or sum(len(held.tokens) for held in request.held_commits) >= MAX_HELD_TOKENS:
            self._send_held(request)
        for lookup in self._lookup_clients:
            lookup.commit(commit)

    def close(self, request: DraftedRequest) -> None:
        self._send_held(request)  # drafts learn from the last tokens, too
        self._leave_gate(request.key)
        self._draft_client.close(request.key)
        for lookup in self._lookup_clients:
            lookup.close(request.key)

    def flush(self) -> None:
        """Send all messages queued for the draft. Lookups queue none."""
        self._draft_client.flush()

    def end_step(self, lost: float) -> None:
        """Update the gates after a step. `lost`: tokens that drafting cost each drafted request."""
        for gate in self._gates.values():
            gate.end_step(lost)

    def receive_growth(
        self,
        requests: Mapping[int, DraftedRequest],
        drawing: Sequence[DraftedRequest],
        before_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Graft growth that has arrived, poll the lookup drafts once, then wait while the schedule says so.

        `drawing`: the requests of the next step if all of them are expected only to draw; empty if it computes prompts,
        which does not wait. A draft in this process runs one round beside prompts; otherwise the schedule decides.
        `before_wait` is called before each wait, and before a draft in this process runs rounds.
        """
        if not self._draft_client.concurrent and any(request.draft_active for request in requests.values()):
            before_wait()
        if self._draft_client.concurrent or not drawing:
            self._graft_updates(self._draft_client.poll(0.0), requests, OWN_DRAFT_SOURCE)
        for source, lookup in enumerate(self._lookup_clients, OWN_DRAFT_SOURCE + 1):
            self._graft_updates(lookup.poll(0.0), requests, source)

        def receive(timeout_s: float) -> bool:
            """From drafts elsewhere, until there are new nodes: the first growth after a commit may be that of the tree
            before. A draft in this process runs one round, which may guess what lookups have guessed."""
            before_wait()
            began, grafted = self._clock(), self.grafted
            end, more = began + timeout_s, True
            while more:
                updates = self._draft_client.poll(max(0.0, end - self._clock()))
                self._graft_updates(updates, requests, OWN_DRAFT_SOURCE)
                more = bool(updates) and updates.may_continue
                if not self._draft_client.concurrent or self.grafted > grafted or self._clock() >= end:
                    break
            self.waited_s += self._clock() - began
            return more

        if any(request.draft_active and request.depth_allowed() > 0 for request in drawing):
            self._schedule.wait(drawing, receive)

    def _states_from(self, request: DraftedRequest, root: int, stop: int) -> Tensor | None:
        """Hidden states of the root and the accepted tokens.

        None without a draft that computes, or if it lacks earlier states: then `send_hidden_states` sends them later.
        """
        lacks = not request.draft_active or request.hidden_states_sent < root
        if lacks or not self._gather or not self._draft_client.hidden_state_layers:
            return None
        request.hidden_states_sent = stop
        return self._gather(request.key, root, stop)

    def _graft_updates(self, updates: PollResult, requests: Mapping[int, DraftedRequest], source: int) -> None:
        for key, growth in updates.growths:
            self.received += len(growth)
            request = requests.get(key)
            if (
                request is not None
                and (source != OWN_DRAFT_SOURCE or not request.paused)
                and self._tokens_valid(growth)
            ):
                if self._sampled_drafts:  # which nodes are verified must not depend on their tokens
                    growth.log_probs = [SAMPLED_DRAFT_SCORE] * len(growth)
                request.draft_started |= source == OWN_DRAFT_SOURCE
                self.grafted += request.tree.graft(growth, request.max_tree_nodes, source)
        for key in updates.lost:
            request = requests.get(key)
            if request is not None and source == OWN_DRAFT_SOURCE:
                request.draft, request.retry_draft_at = None, 0.0
                self._leave_gate(key)

    def _tokens_valid(self, growth: Growth) -> bool:
        """Whether the target has all tokens. A draft of the same vocabulary may be padded to more ids."""
        tokens = [*growth.tokens, *chain.from_iterable(growth.distributions)] if growth.distributions else growth.tokens
        return min(tokens, default=0) >= 0 and max(tokens, default=0) < self._vocabulary_size

    def _opening(self, request: DraftedRequest) -> Opening:
        return request.opening(self._config, self._schedule.depth_factor)

    def _send_held(self, request: DraftedRequest) -> None:
        if request.held_commits:
            self._draft_client.commit(merged(request.held_commits))
            request.held_commits.clear()

    def _send_limit(self, request: DraftedRequest) -> None:
        self._send_held(request)
        self._draft_client.limit(request.limit(self._config, self._schedule.depth_factor))

    def _gate_for(self, draft: str) -> DraftGate:
        if draft not in self._gates:
            idle = [name for name, gate in self._gates.items() if not gate.requests]
            for name in idle[: max(0, len(self._gates) - MAX_IDLE_GATES)]:
                del self._gates[name]
            pause_below = None if self._draft_client.concurrent else DraftGate.PAUSE_LOCAL_BELOW
            self._gates[draft] = DraftGate(self._send_limit, pause_below)
        return self._gates[draft]

    def _leave_gate(self, key: int) -> None:
        if gate := self._gate_of.pop(key, None):
            gate.remove(key)


def merged(commits: Sequence[Commit]) -> Commit:
    """Commits that follow each other as one. Only a single one has hidden states."""
    first, *rest = commits
    if not rest:
        return first
    return Commit(first.request_id, first.base_position, [token for each in commits for token in each.tokens], 0)
