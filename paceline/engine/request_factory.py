"""From a submission to a request: what it draws with, how far it may speculate, what its tree lets in."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from paceline.config import SamplingParams, SpeculativeConfig
from paceline.core.messages import Submission
from paceline.core.policy.calibration import Calibration
from paceline.core.tree import TokenFilter, TokenTree
from paceline.core.verify import Strategy
from paceline.engine.draft_schedule import Clock
from paceline.engine.request import Request
from paceline.grammar.grammar_state import GrammarCompiler, GrammarState
from paceline.model.model import Model


class RequestFactory:
    """Belongs to one engine."""

    def __init__(
        self,
        model: Model,
        speculation: SpeculativeConfig,
        strategy: Strategy,
        grammars: GrammarCompiler,
        calibrations: Mapping[tuple[int, bool], Calibration],
        clock: Clock,
    ) -> None:
        """`calibrations`: by who guesses, and whether the request is greedy."""
        self._model = model
        self._speculation = speculation
        self._strategy = strategy
        self._grammars = grammars
        self._calibrations = calibrations
        self._clock = clock
        self._keys = itertools.count(1)

    def create(self, submission: Submission) -> Request:
        """Raises ValueError, with the reason, for one that cannot be served."""
        tokens = [*submission.prompt, *submission.committed]
        room = self._max_output_tokens(submission, tokens)
        law = self._strategy.effective_params(submission.sampling)
        grammar = self._grammar_state(law, submission)
        calibrations = {who: each for (who, greedy), each in self._calibrations.items() if greedy is law.greedy}
        request = Request(
            next(self._keys),
            submission,
            law,
            min(submission.sampling.max_tokens, room),
            self._speculation.limits(submission.speculative),
            self._model.vocabulary_size,
            TokenTree(
                len(tokens) - 1,
                tokens[-1],
                {source: each.cache for source, each in calibrations.items()},
                self._token_filter(grammar),
                chain=self._strategy.sampled_drafts,
            ),
            calibrations,
            self._clock(),
            grammar,
        )
        request.stats.strategy = self._strategy.name
        request.stats.lossy = not self._strategy.exact
        request.stats.drafter_invariant = self._strategy.drafter_invariant
        return request

    def _max_output_tokens(self, submission: Submission, tokens: list[int]) -> int:
        """Output tokens that fit."""
        prompt = len(submission.prompt)
        room = min(self._model.max_model_len, self._model.slots) - prompt
        if not prompt:
            raise ValueError("the prompt is empty")
        if room < 1:
            raise ValueError(f"the prompt has {prompt} tokens; there is room for {prompt + room - 1}")
        if any(not 0 <= token < self._model.vocabulary_size for token in tokens):
            raise ValueError(f"a token id is outside the vocabulary of {self._model.vocabulary_size}")
        return room

    def _grammar_state(self, law: SamplingParams, submission: Submission) -> GrammarState | None:
        if not law.grammar:
            return None
        return self._grammars.start(law.grammar, law.stop_token_ids, submission.committed)

    def _token_filter(self, grammar: GrammarState | None) -> TokenFilter | None:
        """Guesses outside the grammar would cost rows for nothing; but those drawn from a law have to be tested."""
        if grammar is None or self._strategy.sampled_drafts:
            return None
        return grammar.permits
