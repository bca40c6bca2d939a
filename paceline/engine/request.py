"""One request in a target.

Its tokens are prompt and output. The first `len(slot_table)` of them are *computed*: their keys and values are in
slots. The last token is the root of the request's tree. Once every token before it is computed, running it makes the
target draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.core.messages import GRAMMAR_ERROR, FinishReason, GenerationRequest, SpeculationStats, Usage
from paceline.core.policy.calibration import Calibration
from paceline.core.sampling import History
from paceline.core.tree import TokenTree
from paceline.drafting.speculator import Limit, Opening
from paceline.engine.slot_pool import BLOCK_SIZE, Block, SlotPool
from paceline.grammar.grammar_state import GrammarState
from paceline.model.rows import SlotTable

OWN_DRAFT_SOURCE = 0
"""The source, in trees, of nodes from a request's own draft. Lookup drafts in this process have the next numbers."""


@dataclass(slots=True)
class RequestTimes:
    """By the engine's clock, in seconds."""

    arrived: float
    started: float | None = None
    compute_s: float = 0.0


class Request:
    """State of one submission."""

    def __init__(
        self,
        key: int,
        submission: GenerationRequest,
        history: History,
        tree: TokenTree,
        *,
        max_tokens: int,
        limits: tuple[int, int],
        calibrations: Mapping[int, Calibration],
        arrived: float,
    ) -> None:
        """`key`: the request's id towards drafts. `history`: after the committed output, with the effective parameters.
        `max_tokens`: most output tokens. `limits`: greatest depth and most nodes verified; (0, 0) is plain decoding.
        `calibrations`: by source of the nodes."""
        self.key = key
        self.id = submission.request_id
        self.submission = submission
        self.effective_params = history.params
        self.max_tokens = max_tokens
        self.max_depth, self.max_nodes = limits
        self.tokens = [*submission.prompt, *submission.committed]
        self.history = history
        self.tree = tree
        self.calibrations = calibrations
        self.slot_table = SlotTable()
        self.shared_blocks: list[Block] = []
        self.cached_tokens = 0
        self.prefilled = 0
        """Prompt tokens that were ever computed or found in the cache. Preemption does not reset it."""
        self.stats = SpeculationStats()
        self.times = RequestTimes(arrived)
        self.draft: str | None = None
        self.hidden_states_sent = 0
        """Positions whose hidden states the draft has."""
        self.lookups_opened = False
        """Whether the lookup drafts know the request."""
        self.paused = False
        """Whether the draft is limited to 0 nodes, and growth it sends anyway is dropped."""
        self.draft_started = False
        """Whether the draft has sent growth since it was opened or resumed."""
        self.accepted_average = 0.0
        """Moving average of accepted draft tokens per step, less what drafting costs."""
        self.retry_draft_at = 0.0

    @property
    def client(self) -> str:
        return self.submission.client

    @property
    def group(self) -> tuple[str, str]:
        """The client's requests that share fairly as one; a request without a group is its own."""
        return self.client, self.submission.group or self.id

    @property
    def prompt_tokens(self) -> int:
        return len(self.submission.prompt)

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens without keys and values, at least the root. If it is the only one, the next step draws."""
        return len(self.tokens) - len(self.slot_table)

    @property
    def grammar(self) -> GrammarState | None:
        return self.history.grammar

    # Speculation.

    @property
    def speculative(self) -> bool:
        return self.max_depth > 0

    @property
    def drafted(self) -> bool:
        """Whether draft tokens may be on their way."""
        return self.draft is not None and not self.paused

    def depth_allowed(self) -> int:
        """Greatest depth worth verifying: `max_tokens` must leave room for the bonus token."""
        return min(self.max_depth, self.max_tokens - self.output_tokens - 1)

    @property
    def max_tree_nodes(self) -> int:
        """Most nodes in the tree. One step verifies fewer, but the draft grows while the target is busy."""
        return 4 * self.max_nodes

    def candidate_nodes(self) -> Sequence[int]:
        """The nodes that one step may verify, best first."""
        depth = self.depth_allowed()
        return self.tree.best(self.max_nodes, depth) if depth > 0 else []

    def limit(self, depth_factor: int, min_path_probability: float) -> Limit:
        """How far the draft may grow the tree now; see `opening`."""
        nodes = 0 if self.paused else self.max_tree_nodes
        return Limit(self.key, depth_factor * self.max_depth if nodes else 0, nodes, min_path_probability)

    def opening(self, strategy: str, depth_factor: int, min_path_probability: float) -> Opening:
        """The first message to a draft, which starts unpaused. It grows `depth_factor` times the depth of one step."""
        return Opening(
            self.key,
            list(self.tokens),
            self.output_tokens,
            self.submission.sampling,
            depth_factor * self.max_depth,
            self.max_tree_nodes,
            strategy,
            min_path_probability,
            cache_salt=self.submission.cache_salt,
        )

    # Slots.

    def attach_prefix(self, pool: SlotPool) -> None:
        """Share the cached blocks of this path. The root is always computed anew."""
        self.shared_blocks = pool.match_prefix(self.tokens[:-1], self.submission.cache_salt)
        self.slot_table.slots = [slot for block in self.shared_blocks for slot in block.slots]

    def start(self) -> None:
        """Count the attached prefix as cached, unless the request itself left it there before preemption."""
        if not self.prefilled:
            self.cached_tokens = self.prefilled = min(len(self.slot_table), self.prompt_tokens)

    def record_prefill(self, stop: int) -> int:
        """The tokens before `stop` are computed. Return how many prompt tokens were computed for the first time."""
        before, self.prefilled = self.prefilled, max(self.prefilled, min(stop, self.prompt_tokens))
        return self.prefilled - before

    def cache_blocks(self, pool: SlotPool) -> None:
        """Share the computed blocks with requests whose tokens begin alike."""
        pool.cache_blocks(self.tokens, self.slot_table.slots, self.shared_blocks, self.submission.cache_salt)

    def release_slots(self, pool: SlotPool, *, cached: bool = True) -> None:
        """Give up every slot. `cached`: computed blocks stay in the cache while there is room."""
        if cached:
            self.cache_blocks(pool)
        pool.release(self.slot_table.slots, self.shared_blocks)
        self.shared_blocks = []
        self.slot_table.clear()

    def own_slots(self) -> Sequence[int]:
        """The slots outside shared blocks."""
        return self.slot_table.slots[len(self.shared_blocks) * BLOCK_SIZE :]

    # The end.

    def is_stop_token(self, token: int) -> bool:
        return token in self.submission.sampling.stop_token_ids

    def check_finish(self, tokens: Sequence[int] = ()) -> FinishReason | None:
        """Whether and why the request ends with the last of `tokens`, or with its output so far if there are none."""
        if self.is_stop_token(tokens[-1] if tokens else self.tokens[-1]):
            return FinishReason.STOP
        if not self.grammar_known(tokens):
            return None
        if self.grammar is not None and self.grammar.finished(tokens):
            return FinishReason.ERROR if self.grammar_error(tokens) else FinishReason.STOP
        return FinishReason.LENGTH if self.output_tokens + len(tokens) >= self.max_tokens else None

    def truncate_at_end(self, tokens: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """The tokens up to the one that ends the request, or after which the grammar's state is not known yet."""
        if self.grammar is None:
            tokens_left, stops = self.max_tokens - self.output_tokens, self.submission.sampling.stop_token_ids
            for count, token in enumerate(tokens, 1):
                if token in stops or count >= tokens_left:
                    return list(tokens[:count]), FinishReason.STOP if token in stops else FinishReason.LENGTH
            return list(tokens), None
        for count in range(1, len(tokens) + 1):
            reason = self.check_finish(tokens[:count])
            if reason is not None or not self.grammar_known(tokens[:count]):
                return list(tokens[:count]), reason
        return list(tokens), None

    def grammar_error(self, tokens: Sequence[int] = ()) -> str:
        """Why the grammar failed, at the latest after these tokens; empty if it did not."""
        error = self.grammar.error(tokens) if self.grammar is not None else ""
        return f"{GRAMMAR_ERROR}{error}" if error else ""

    def grammar_known(self, tokens: Sequence[int] = ()) -> bool:
        """Whether the grammar's state after these tokens is known. If not, a step can commit no more than them."""
        return self.grammar is None or self.grammar.within_limits(tokens)

    def rejection_reason(self) -> str:
        """Why the request cannot start; empty if it can."""
        if error := self.grammar_error():
            return error
        if self.output_tokens and self.check_finish() is not None:
            return f"the request is over already: {self.output_tokens} tokens were committed, the last one ended it"
        if self.grammar is not None and self.grammar.finished(()):
            return f"{GRAMMAR_ERROR}it leaves nothing to generate"
        return ""

    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.output_tokens, self.cached_tokens)
