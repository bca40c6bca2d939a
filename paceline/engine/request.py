"""One request on its way through a target.

Its tokens are prompt and output; `len(lane)` of them are *computed*, with keys and values in slots. The last token
is the root of its tree: once every token before it is computed, running it makes the target draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.config import SamplingParams
from paceline.core.messages import GRAMMAR_ERROR, FinishReason, SpeculationStats, Submission, Usage
from paceline.core.policy.calibration import Calibration
from paceline.core.sampling import History
from paceline.core.tree import TokenTree
from paceline.drafting.speculator import Limit, Opening
from paceline.engine.slot_pool import BLOCK_SIZE, Block, SlotPool
from paceline.grammar.grammar_state import GrammarState
from paceline.model.rows import SlotTable

POOL_SOURCE = 0
"""A tree tells apart whose guesses it holds. This is the source of those that a request's draft makes; those who draft
for all in this process have the next numbers."""


@dataclass(slots=True)
class RequestTimes:
    """When things happened, by the engine's clock."""

    arrived: float
    started: float | None = None
    compute_s: float = 0.0


class Request:
    """State of one submission."""

    def __init__(
        self,
        key: int,
        submission: Submission,
        law: SamplingParams,
        max_tokens: int,
        limits: tuple[int, int],
        vocabulary_size: int,
        tree: TokenTree,
        calibrations: Mapping[int, Calibration],
        arrived: float,
        grammar: GrammarState | None = None,
    ) -> None:
        """`law`: what the strategy draws with. `limits`: deepest node and most nodes verified; (0, 0) is plain.
        `calibrations`: what guesses in the tree count for, by who makes them."""
        self.key = key
        self.id = submission.request_id
        self.submission = submission
        self.effective_params = law
        self.max_tokens = max_tokens
        self.max_depth, self.max_nodes = limits
        self.tokens = [*submission.prompt, *submission.committed]
        self.history = History(law, submission.prompt, submission.committed, vocabulary_size, grammar)
        self.tree = tree
        self.calibrations = calibrations
        self.slot_table = SlotTable()
        self.shared_blocks: list[Block] = []
        self.cached_tokens = 0
        self.prefilled = 0
        """Prompt tokens that were ever computed or found in the cache. Preemption does not undo it."""
        self.stats = SpeculationStats()
        self.times = RequestTimes(arrived)
        self.draft: str | None = None
        self.hidden_states_sent = 0
        """Positions whose hidden states its draft has been told of."""
        self.lookups_opened = False
        """Whether who drafts for all was told of it."""
        self.paused = False
        """Whether its draft is told to grow nothing, and what it grows all the same is not looked at."""
        self.draft_started = False
        """Whether its draft has grown something since it was opened or resumed."""
        self.accepted_average = 0.0
        """Guesses of its draft that a step commits, as of late."""
        self.retry_draft_at = 0.0

    @property
    def client(self) -> str:
        return self.submission.client

    @property
    def group(self) -> tuple[str, str]:
        """Of its client's requests those with which it shares a turn; without a name it is alone."""
        return self.client, self.submission.group or self.id

    @property
    def prompt_tokens(self) -> int:
        return len(self.submission.prompt)

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens without keys and values yet. The root is one of them; if it is the only one, a draw is due."""
        return len(self.tokens) - len(self.slot_table)

    @property
    def speculative(self) -> bool:
        return self.max_depth > 0

    @property
    def drafted(self) -> bool:
        """Whether guesses may be under way."""
        return self.draft is not None and not self.paused

    def depth_allowed(self) -> int:
        """Deepest node worth verifying: the bonus token after it must still be wanted."""
        return min(self.max_depth, self.max_tokens - self.output_tokens - 1)

    @property
    def max_tree_nodes(self) -> int:
        """Most nodes in the tree: more than one step verifies, since a draft grows ahead while the target is busy."""
        return 4 * self.max_nodes

    def attach_prefix(self, pool: SlotPool) -> None:
        """Take over what the cache has of this path. The root is always computed afresh."""
        self.shared_blocks = pool.match_prefix(self.tokens[:-1], self.submission.cache_salt)
        self.slot_table.slots = [slot for block in self.shared_blocks for slot in block.slots]

    def start(self) -> None:
        """It runs from now on: what `attach` found counts as cached, unless it is what preemption left there."""
        if not self.prefilled:
            self.cached_tokens = self.prefilled = min(len(self.slot_table), self.prompt_tokens)

    def record_prefill(self, stop: int) -> int:
        """The tokens before `stop` were computed; how many of the prompt are so for the first time."""
        before, self.prefilled = self.prefilled, max(self.prefilled, min(stop, self.prompt_tokens))
        return self.prefilled - before

    def cache_blocks(self, pool: SlotPool) -> None:
        """Others whose tokens begin alike need not compute again what is computed of these."""
        pool.cache_blocks(self.tokens, self.slot_table.slots, self.shared_blocks, self.submission.cache_salt)

    def release_slots(self, pool: SlotPool, *, cached: bool = True) -> None:
        """Give up every slot. `cached`: what is computed stays in the cache for as long as there is room."""
        if cached:
            self.cache_blocks(pool)
        pool.release(self.slot_table.slots, self.shared_blocks)
        self.shared_blocks = []
        self.slot_table.clear()

    def own_slots(self) -> Sequence[int]:
        return self.slot_table.slots[len(self.shared_blocks) * BLOCK_SIZE :]

    @property
    def grammar(self) -> GrammarState | None:
        return self.history.grammar

    def check_finish(self, tokens: Sequence[int] = ()) -> FinishReason | None:
        """Whether the request ends with the last of these tokens after its output, or, without any, with its output."""
        if self.is_stop_token(tokens[-1] if tokens else self.tokens[-1]):
            return FinishReason.STOP
        if not self.grammar_known(tokens):
            return None
        if self.grammar is not None and self.grammar.finished(tokens):
            return FinishReason.ERROR if self.grammar_error(tokens) else FinishReason.STOP
        return FinishReason.LENGTH if self.output_tokens + len(tokens) >= self.max_tokens else None

    def grammar_error(self, tokens: Sequence[int] = ()) -> str:
        """What is wrong with its grammar, or with the end that these tokens have brought it to. Empty: nothing."""
        error = self.grammar.error(tokens) if self.grammar is not None else ""
        return f"{GRAMMAR_ERROR}{error}" if error else ""

    def grammar_known(self, tokens: Sequence[int] = ()) -> bool:
        """Whether its grammar says what may follow these tokens; if not, they are all that a step can commit."""
        return self.grammar is None or self.grammar.within_limits(tokens)

    def truncate_at_end(self, tokens: Sequence[int]) -> tuple[list[int], FinishReason | None]:
        """The tokens up to the one that ends it, if one does, or the one after which its grammar is not known."""
        if self.grammar is None:
            room, stops = self.max_tokens - self.output_tokens, self.submission.sampling.stop_token_ids
            for count, token in enumerate(tokens, 1):
                if token in stops or count >= room:
                    return list(tokens[:count]), FinishReason.STOP if token in stops else FinishReason.LENGTH
            return list(tokens), None
        for count in range(1, len(tokens) + 1):
            reason = self.check_finish(tokens[:count])
            if reason is not None or not self.grammar_known(tokens[:count]):
                return list(tokens[:count]), reason
        return list(tokens), None

    def rejection_reason(self) -> str:
        """Why it cannot be served, now that it is about to begin; empty if it can."""
        if error := self.grammar_error():
            return error
        if self.output_tokens and self.check_finish() is not None:
            return f"the request is over already: {self.output_tokens} tokens were committed, the last one ended it"
        if self.grammar is not None and self.grammar.finished(()):
            return f"{GRAMMAR_ERROR}it leaves nothing to generate"
        return ""

    def is_stop_token(self, token: int) -> bool:
        return token in self.submission.sampling.stop_token_ids

    def limit(self, ahead: int, least: float) -> Limit:
        """How far its tree may grow now, with paths no less probable than `least`."""
        nodes = 0 if self.paused else self.max_tree_nodes
        return Limit(self.key, ahead * self.max_depth if nodes else 0, nodes, least)

    def opening(self, strategy: str, ahead: int, least: float) -> Opening:
        """What a draft is told first: to grow `ahead` times the depth that one step verifies. It starts unpaused."""
        depth, tokens, sampling = ahead * self.max_depth, list(self.tokens), self.submission.sampling
        salt = self.submission.cache_salt
        return Opening(
            self.key, tokens, self.output_tokens, sampling, depth, self.max_tree_nodes, strategy, least, cache_salt=salt
        )

    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.output_tokens, self.cached_tokens)
