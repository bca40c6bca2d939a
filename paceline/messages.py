"""Messages between a gateway and a target engine, as plain Python; `paceline.wire` encodes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import attrgetter
from typing import Any, Self

from paceline.config import SamplingParams, SpeculativeOptions


class FinishReason(StrEnum):
    """Why a request ended; `stop` and `length` as in OpenAI's API, `abort` as in vLLM's."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "abort"
    """The client has ended the request."""
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion to generate, as the engine gets it; the wire carries every field."""

    request_id: str
    prompt: Sequence[int]
    sampling: SamplingParams
    """`stop_token_ids` include the model's own, unless the client ignores these."""
    speculative: SpeculativeOptions = field(default_factory=SpeculativeOptions)
    committed: Sequence[int] = ()
    """Output that another target produced before it was lost."""
    draft_addresses: Sequence[str] = ()
    """In the order in which the target tries them."""
    cache_salt: str = ""
    """Requests share cached prefixes and learned statistics only with requests of the same salt; "" is a salt, too."""
    client: str = ""
    """The scheduler alternates between clients; "" is a client, too."""
    group: str = ""
    """The scheduler alternates between the groups of a client: the choices of one API request. "": its own group."""
    priority: int = 0
    """Of two requests of one client, the one with the lower number starts first."""
    trace_parent: str = ""
    """The span above those of this request, see `paceline.telemetry.tracing`. "": the request is not traced."""
    return_tree: bool = False
    """Whether deltas carry the trees that were verified."""
    accepted_average: float | None = None
    """As `SpeculationStats` had it at the target before; None: there was none, or it did not draft."""

    @property
    def tokens(self) -> list[int]:
        """The prompt and the committed output."""
        return [*self.prompt, *self.committed]


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Natural-log probability of a token at its position, and the most probable tokens as (token, log-probability)."""

    log_prob: float
    top: Sequence[tuple[int, float]] = ()
    """Best first. With `SamplingParams.logprob_token_ids`: those tokens, in that order."""
    rank: int = 0
    """The token's place by probability, from 1; 0: unknown (an older worker)."""


@dataclass(frozen=True, slots=True)
class PromptLogProbs:
    """Log-probabilities of consecutive tokens of a prompt; the token at position 0 has none."""

    start: int
    """Position of the first entry's token."""
    entries: Sequence[LogProbs]


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """The sender's own clock, in seconds."""

    queue_s: float = 0.0
    compute_s: float = 0.0
    total_s: float = 0.0
    prefill_s: float = 0.0
    """From the first row to the first token; 0 before there is one."""

    @property
    def inference_s(self) -> float:
        """From the first row to the end."""
        return max(0.0, self.total_s - self.queue_s)

    @property
    def decode_s(self) -> float:
        """From the first token to the end."""
        return max(0.0, self.inference_s - self.prefill_s) if self.prefill_s else 0.0


def reduce_slots(message: Any) -> tuple[type[Any], tuple[object, ...]]:
    """A fast `__reduce__` for dataclasses with slots that pass through pipes in every step."""
    kind = type(message)
    return kind, attrgetter(*kind.__match_args__)(message)


@dataclass(slots=True)
class SpeculationStats:
    """Counts of draft tokens of one request. Depth counts from 1; bonus tokens are not counted."""

    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    drafted_tokens: int = 0
    verifications: int = 0
    steps: int = 0
    drafts: list[str] = field(default_factory=list)
    strategy: str = "coupled"
    """The verification strategy; the flags below are its promises: see `paceline.config.Strategy`."""
    lossy: bool = False
    drafter_invariant: bool = True
    accepted_average: float | None = field(default=None, compare=False)
    """Moving average of accepted draft tokens per step, less what drafting costs; None: no draft served the request."""

    __reduce__ = reduce_slots

    def record(self, nodes: int, reached: int, accepted: int) -> None:
        """Count a step that verified `nodes` nodes, the deepest at depth `reached`, and accepted `accepted` of them."""
        self.steps += 1
        if not nodes:
            return
        self.verifications += 1
        self.drafted_tokens += nodes
        missing = [0] * (reached - len(self.drafted_by_depth))
        self.drafted_by_depth += missing
        self.accepted_by_depth += missing
        for depth in range(reached):
            self.drafted_by_depth[depth] += 1
        for depth in range(min(accepted, reached)):
            self.accepted_by_depth[depth] += 1

    def snapshot(self) -> SpeculationStats:
        """An independent copy."""
        return replace(
            self,
            drafted_by_depth=self.drafted_by_depth.copy(),
            accepted_by_depth=self.accepted_by_depth.copy(),
            drafts=self.drafts.copy(),
        )

    @property
    def accepted_tokens(self) -> int:
        return sum(self.accepted_by_depth)

    @property
    def acceptance_length(self) -> float:
        """Accepted tokens per verification, without the bonus token."""
        return self.accepted_tokens / self.verifications if self.verifications else 0.0


@dataclass(slots=True)
class VerifiedTree:
    """The nodes that one step verified for one request: parallel lists, parents before their children.

    Nodes count from 1. `parents`: 0 is the root, the last token that was committed before the step. `methods`: of the
    draft that guessed the node; of several drafts, the one that was surest.
    """

    parents: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    methods: list[str] = field(default_factory=list)

    __reduce__ = reduce_slots


GRAMMAR_ERROR = "grammar: "
"""Prefix of errors caused by the request's grammar; retrying on another target would not help."""


@dataclass(slots=True)
class Delta:
    """New tokens of one request. `accepted[i]`: token i was drafted, and is not the target's bonus token."""

    request_id: str
    tokens: list[int] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    log_probs: list[LogProbs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    usage: Usage | None = None
    speculation: SpeculationStats | None = None
    timings: Timings = Timings()
    error: str = ""
    prompt_log_probs: list[PromptLogProbs] = field(default_factory=list)
    """In order of position. The tokens after a part of the prompt come with it or later."""
    trees: list[VerifiedTree] = field(default_factory=list)
    """One for each step, if the request asks for them."""

    __reduce__ = reduce_slots

    def extend(self, later: Self) -> None:
        """Append the request's next delta. Its statistics replace the ones so far."""
        self.tokens += later.tokens
        self.accepted += later.accepted
        self.log_probs += later.log_probs
        self.prompt_log_probs += later.prompt_log_probs
        self.trees += later.trees
        self.finish_reason, self.stop_token, self.error = later.finish_reason, later.stop_token, later.error
        self.usage, self.speculation, self.timings = later.usage, later.speculation, later.timings


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy a target is, as of its last step."""

    running: int
    waiting: int
    free_slots: int
    rows: int
    step_s: float


@dataclass(frozen=True, slots=True)
class TargetDescription:
    """A target worker and its model. Its engine leaves `worker_id`, `model` and `labels` to its service."""

    worker_id: str
    model: str
    vocabulary_fingerprint: str
    vocabulary_size: int
    max_model_len: int
    slots: int
    rows_invariant: bool
    eos_token_ids: Sequence[int]
    method: str
    """Empty without speculation."""
    numerics: str = ""
    """Identifies the numerics, see `paceline.model.Model`; targets with equal ones produce equal tokens. Empty: unknown
    (an older worker)."""
    labels: Sequence[str] = ()
    """What routing rules may ask for, each KEY=VALUE."""
    features: Sequence[str] = ()
    """What the worker can do, see `paceline.target_features`. Empty: what every worker can (an older worker)."""
    beside: Sequence[str] = ()
    """Further methods, which draft inside the target."""
    layers: int = field(default=0, compare=False)
    """Of the model; known to the worker alone."""
    rows_per_s: float = field(default=0.0, compare=False)
    """Of full passes, as estimated at start-up; 0: unknown. Sent with the load."""
