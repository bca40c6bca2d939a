"""One request in a target.

Its tokens are prompt and output. The first `len(slot_table)` of them are *computed*: their keys and values are in
slots. The last token is the root of the request's tree. Once every token before it is computed, running it makes the
target draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.core.logits_rules import History
from paceline.core.policy.calibration import Calibration
from paceline.core.tree import TokenTree
from paceline.engine.drafted_request import DraftedRequest
from paceline.engine.slot_pool import Block, SlotPool
from paceline.grammar.grammar_state import GrammarState
from paceline.messages import GRAMMAR_ERROR, FinishReason, GenerationRequest, Timings, Usage
from paceline.model.rows import BLOCK_SIZE, SlotTable


@dataclass(slots=True)
class RequestTimes:
    """When an engine did what for one request, by its clock, in seconds."""

    arrived: float
    started: float | None = None
    """When its first rows ran."""
    first_token: float | None = None
    """When it had its first token from this engine."""
    compute_s: float = 0.0

    def add(self, start: float, seconds: float) -> None:
        """Rows of the request ran for `seconds`, from `start` on."""
        self.started = start if self.started is None else self.started
        self.compute_s += seconds

    def commit(self, now: float) -> None:
        """It had tokens."""
        self.first_token = now if self.first_token is None else self.first_token

    def timings(self, now: float) -> Timings:
        """Of a request that ends now."""
        started = now if self.started is None else self.started
        prefill_s = 0.0 if self.first_token is None else self.first_token - started
        return Timings(started - self.arrived, self.compute_s, now - self.arrived, prefill_s)


class Request(DraftedRequest):
    """The engine's state of one request."""

    def __init__(
        self,
        key: int,
        generation_request: GenerationRequest,
        history: History,
        tree: TokenTree,
        *,
        max_tokens: int,
        limits: tuple[int, int],
        calibrations: Mapping[int, Calibration],
        arrived: float,
        grammar: GrammarState | None = None,
    ) -> None:
        """See `DraftedRequest`. `history`: after the committed output, with the effective parameters. `grammar`: that
        of the history."""
        super().__init__(key, generation_request, tree, max_tokens=max_tokens, limits=limits, calibrations=calibrations)
        self.id = generation_request.request_id
        self.effective_params = history.params
        self.history = history
        self.grammar = grammar
        self.slot_table = SlotTable()
        self.shared_blocks: list[Block] = []
        self.cached_tokens = 0
        self.prefilled = 0
        """Prompt tokens that were ever computed or found in the cache. Preemption does not reset it."""
        self.rows_scored = 0
        """Prompt tokens, from the first on, whose rows have scored the next token. Preemption does not reset it."""
        self.times = RequestTimes(arrived)

    @property
    def client(self) -> str:
        return self.generation_request.client

    @property
    def group(self) -> tuple[str, str]:
        """The client's requests that share fairly as one; a request without a group is its own."""
        return self.client, self.generation_request.group or self.id

    @property
    def priority(self) -> int:
        """The lower, the earlier, among the client's requests."""
        return self.generation_request.priority

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens without keys and values, at least the root. If it is the only one, the next step draws."""
        return len(self.tokens) - len(self.slot_table)

    @property
    def rows_to_score(self) -> range:
        """The prompt's tokens whose rows have yet to score the token after them."""
        scores = self.generation_request.sampling.prompt_logprobs is not None
        return range(self.rows_scored, self.prompt_tokens - 1) if scores else range(0)

    # Slots.

    def attach_prefix(self, pool: SlotPool) -> None:
        """Share the cached blocks of this path. The root is always computed anew, as are rows that have to score."""
        computed = self.rows_scored if self.rows_to_score else len(self.tokens) - 1
        self.shared_blocks = pool.match_prefix(self.tokens[:computed], self.generation_request.cache_salt)
        self.slot_table.slots = [slot for block in self.shared_blocks for slot in block.slots]

    def start(self, prefix: int) -> None:
        """Count the tokens of the attached prefix as cached, unless the request itself left them there before
        preemption."""
        if not self.prefilled:
            self.cached_tokens = self.prefilled = min(prefix, self.prompt_tokens)

    def record_prefill(self, stop: int) -> int:
        """The tokens before `stop` are computed. Return how many prompt tokens were computed for the first time."""
        before, self.prefilled = self.prefilled, max(self.prefilled, min(stop, self.prompt_tokens))
        return self.prefilled - before

    def cache_blocks(self, pool: SlotPool) -> None:
        """Share the computed blocks with requests whose tokens begin alike."""
        pool.cache_blocks(self.tokens, self.slot_table.slots, self.shared_blocks, self.generation_request.cache_salt)

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

    def commit(self, tokens: Sequence[int]) -> None:
        super().commit(tokens)
        self.history.extend(tokens)

    # The end.

    def is_stop_token(self, token: int) -> bool:
        return token in self.generation_request.sampling.stop_token_ids

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
            tokens_left, stops = self.max_tokens - self.output_tokens, self.generation_request.sampling.stop_token_ids
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
        if self.output_tokens and (ended_by := self.check_finish()) is not None:
            if ended_by is FinishReason.LENGTH and self.output_tokens < self.generation_request.sampling.max_tokens:
                return (
                    f"the prompt has {self.prompt_tokens} tokens, and {self.output_tokens} were committed after it: "
                    f"there is room for {self.prompt_tokens + self.max_tokens}, and none for another token"
                )
            return f"the request is over already: {self.output_tokens} tokens were committed, the last one ended it"
        if self.grammar is not None and self.grammar.finished(()):
            return f"{GRAMMAR_ERROR}it leaves nothing to generate"
        return ""

    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.output_tokens, self.cached_tokens)
