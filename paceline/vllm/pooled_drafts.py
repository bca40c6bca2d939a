"""Draft tokens for the rows of a batch, from a pool of draft workers. Knows nothing of vLLM but what `propose` gets.

It uses the parts of Paceline's own engine: `DraftManager` with its gate and waits, calibration, and the choice of nodes
by what a row costs. A fault of any of them is logged, and then there are no drafts for a while.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from statistics import median
from typing import Protocol

from torch import Tensor

from paceline.config import SamplingParams, SpeculativeConfig
from paceline.core.policy.calibration import Calibration
from paceline.core.policy.step_cost import FREE_ROWS, RowChoice, StepCost
from paceline.core.tree import TokenTree
from paceline.drafting import build_lookups
from paceline.engine.draft_client import DraftClient, LocalDraftClient
from paceline.engine.draft_manager import DraftManager, GatherHiddenStates
from paceline.engine.draft_schedule import make_draft_schedule
from paceline.engine.drafted_request import OWN_DRAFT_SOURCE
from paceline.ipc.pipe import PipeClosedError
from paceline.launcher import Backoff
from paceline.messages import GenerationRequest
from paceline.vllm.batch import Batch, ChainRequest, RowDescription, TokenIds

log = logging.getLogger(__name__)

PLAIN_STEPS = 3
"""So many measured steps have no draft tokens: they show what plain decoding costs."""
TIMED_STEPS = 1000
"""Steps of which the median time is known."""
GREEDY_ROW = RowDescription(SamplingParams(temperature=0.0))
"""Of draws with noise that drafts cannot predict: they guess the likeliest tokens."""

DescribeRow = Callable[[int], RowDescription]


class DraftLinks(Protocol):
    """The way to the draft workers."""

    def open(self) -> DraftClient:
        """A new client, without requests."""

    def close(self) -> None:
        """End the client's requests and links."""

    def addresses(self) -> Sequence[str]:
        """Of draft workers for one more request, best first."""


class PooledDrafts:
    """Proposes draft tokens. Called from one thread."""

    def __init__(
        self,
        links: DraftLinks,
        config: SpeculativeConfig,
        vocabulary_size: int,
        max_model_len: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`links` are opened again after each fault. `config`: lookups, most draft tokens of a step, and
        whether their rows must pay."""
        self._links = links
        self._config = config
        self._vocabulary_size = vocabulary_size
        self._max_model_len = max_model_len
        self._describe: DescribeRow = lambda row: GREEDY_ROW
        self._gather: GatherHiddenStates | None = None
        self._strategy = "greedy"
        self._clock = clock
        self._keys = count(1)
        self._backoff = Backoff()
        self._connected_at = 0.0
        self._retry_at: float | None = 0.0
        """When the links are opened; None: they are open."""
        self._propose_s: deque[float] = deque(maxlen=TIMED_STEPS)
        self._cost = StepCost()
        self._measured_steps = 0
        self._node_cost = self._cost if config.row_budget else StepCost(FREE_ROWS)
        sources = range(OWN_DRAFT_SOURCE, OWN_DRAFT_SOURCE + 1 + len(config.beside))
        self._calibrations = {source: Calibration() for source in sources}
        # Made by `start`, anew after each fault.
        self._client: DraftClient
        self._manager: DraftManager
        self._batch: Batch
        self._proposed: list[ChainRequest] | None
        """The requests of the last step, if all of them drew."""
        self._proposed_rows: int
        """Rows of the step that verifies what was proposed."""
        self._called_at: float
        self._returned_at: float

    def predict_draws(self, describe: DescribeRow) -> None:
        """Let drafts predict draws with noise instead of the likeliest tokens. Before `start`."""
        self._describe, self._strategy = describe, "coupled"

    def read_hidden_states(self, gather: GatherHiddenStates) -> None:
        """Send hidden states, gathered by row, to drafts that read them. Before `start`."""
        self._gather = gather

    def propose(self, sampled: Sequence[Sequence[int]], lengths: TokenIds, token_ids: TokenIds) -> list[list[int]]:
        """The draft tokens of each row; arguments as in `RemoteDrafts.propose`."""
        if self._retry_at is None or self._clock() >= self._retry_at:
            try:
                if self._retry_at is not None:
                    self.start()
                return self._propose(sampled, lengths, token_ids)
            except PipeClosedError:
                log.warning("the process of the links to draft workers has ended")
                self._stop()
            except Exception:
                log.exception("no drafts for a while")
                self._stop()
        return [[] for _ in sampled]

    @property
    def propose_ms(self) -> float:
        """Median time of `propose` in the last steps, waits for growth left out; 0 before the first."""
        return 1e3 * median(self._propose_s or [0.0])

    def start(self) -> None:
        """Open the links, so that drafts are connected before the first request."""
        self._retry_at, self._connected_at = None, self._clock()
        self._batch = Batch(self._open, lambda row: self._describe(row).cache_salt)
        self._proposed, self._proposed_rows = None, 0
        self._called_at = self._returned_at = 0.0
        self._client = self._links.open()
        self._manager = DraftManager(
            self._client,
            [LocalDraftClient(each) for each in build_lookups(self._config)],
            self._config.model_copy(update={"rejection_sampling_strategy": self._strategy}),
            make_draft_schedule(concurrent=True, lockstep=False, cost=self._cost, clock=self._clock),
            self._vocabulary_size,
            self._clock,
            self._gather and self._gather_by_request,
        )

    def _gather_by_request(self, key: int, start: int, stop: int) -> Tensor:
        assert self._gather is not None
        return self._gather(self._batch.requests[key].row, start, stop)

    def _stop(self) -> None:
        """Give up all requests, and the client; try again after a while."""
        self._links.close()
        now = self._clock()
        self._retry_at = now + self._backoff.after(now - self._connected_at)

    def _propose(self, sampled: Sequence[Sequence[int]], lengths: TokenIds, token_ids: TokenIds) -> list[list[int]]:
        called_at, waited_s = self._clock(), self._manager.waited_s
        rows, forgotten = self._batch.update(sampled, lengths, token_ids)
        for request in forgotten:
            self._manager.close(request)
        requests = [request for request, _ in rows]
        drawing = [request for request, drawn in zip(requests, sampled, strict=True) if drawn]
        for request, missing in rows:
            if missing:
                self._commit(request, missing, computed=request in drawing)
        self._observe_step(requests, len(drawing) == len(requests), called_at)
        self._manager.find_drafts(requests)
        for request in drawing:  # of rows that draw, vLLM has computed all states before the root
            self._manager.send_hidden_states(request, len(request.tokens) - 1)
        self._manager.flush()
        warm = self._measured_steps >= PLAIN_STEPS
        self._manager.receive_growth(self._batch.requests, drawing if warm else [])
        chosen = self._choose(drawing) if warm else {}
        self._proposed = requests if len(drawing) == len(requests) else None
        self._proposed_rows = len(requests) + sum(map(len, chosen.values()))
        self._called_at, self._returned_at = called_at, self._clock()
        self._propose_s.append(self._returned_at - called_at - (self._manager.waited_s - waited_s))
        return [chosen.get(request.key, []) for request in requests]

    def _open(self, row: int, tokens: TokenIds) -> ChainRequest:
        """The request of a row that is new."""
        known = tokens.tolist()
        row_of = self._describe(row)
        prompt = known[: row_of.prompt_tokens]
        max_tokens = max(1, self._max_model_len - len(prompt))
        key, depth = next(self._keys), min(self._config.limits(row_of.speculative))  # a step verifies one path
        return ChainRequest(
            key,
            GenerationRequest(
                str(key), prompt, row_of.params, committed=known[len(prompt) :], cache_salt=row_of.cache_salt
            ),
            TokenTree(len(known) - 1, known[-1], {source: each.cache for source, each in self._calibrations.items()}),
            max_tokens=max_tokens,
            limits=(depth, depth),
            calibrations=self._calibrations,
            addresses=self._links.addresses,
        )

    def _commit(self, request: ChainRequest, drawn: Sequence[int], *, computed: bool) -> None:
        """`drawn`: the accepted draft tokens and one more. `computed`: whether vLLM computed their states just now."""
        accepted = request.tree.match(drawn[:-1])
        request.observe_outcomes(accepted, drawn)
        self._manager.commit(request, drawn, accepted, computed=computed)
        request.commit(drawn)

    def _observe_step(self, requests: Sequence[ChainRequest], only_draws: bool, called_at: float) -> None:
        """Judge the drafts. Learn what the last step cost, unless it computed prompts or had other requests."""
        drafted, lost = sum(request.draft_active for request in requests), 0.0
        if only_draws and requests == self._proposed:
            plain, nodes = len(requests), self._proposed_rows - len(requests)
            self._cost.observe(self._proposed_rows, called_at - self._returned_at, nodes)
            self._measured_steps += 1
            # By the line: single steps differ by more than drafts cost.
            seconds = self._cost(self._proposed_rows, nodes) + self._returned_at - self._called_at
            lost = plain * min(seconds / self._cost(plain) - 1, StepCost.MAX_LOST_STEPS)
        self._manager.end_step(lost / drafted if drafted else 0.0)

    def _choose(self, drawing: Sequence[ChainRequest]) -> dict[int, list[int]]:
        """The draft tokens that are worth their rows, by request."""
        chosen = RowChoice([(request.tree, request.candidate_nodes()) for request in drawing], self._node_cost).nodes()
        return {
            request.key: [request.tree.tokens[node] for node in nodes]
            for request, nodes in zip(drawing, chosen, strict=True)
        }
