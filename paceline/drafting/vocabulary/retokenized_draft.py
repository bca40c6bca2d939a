"""Drafting with a model of another vocabulary than the target's, by what its guesses read like (SLEM, or UAG).

A draft model drafts in its own vocabulary, as if for itself. What its guesses read like is encoded by the target's
tokenizer, and grows in a tree of the target's tokens. What the target commits is encoded by the draft's tokenizer;
where that changes how the text before was written, the draft is taken back to what still holds.

Noise does not carry over from one vocabulary to another, so a draft guesses what is likeliest at any temperature.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.config import SamplingParams
from paceline.core.growth import Growth
from paceline.core.tree import ROOT, TokenTree
from paceline.drafting.methods.draft_model import DraftModelSpeculator
from paceline.drafting.speculator import Commit, DraftError, Limit, Opening, Speculator
from paceline.drafting.vocabulary.draft_transcript import DraftTranscript
from paceline.drafting.vocabulary.stable_tokens import StableTokens, common_prefix_length
from paceline.drafting.vocabulary.vocabulary_mapping import VocabularyMapping

GREEDY = SamplingParams(temperature=0.0)
DRAFT_TOKENS_PER_TARGET_TOKEN = 2
"""A draft may take so many tokens for one of the target's."""


@dataclass(slots=True, eq=False)
class _RetokenizedRequest:
    """`tree` is the replica of the target's; `told` are the tokens that the draft knows, the last of them its root."""

    opening: Opening
    tree: TokenTree
    transcript: DraftTranscript
    draft_tokens: list[int] = field(default_factory=list)
    nodes_read: int = 0
    """How many of the draft's guesses are in the tree already, as far as they can be."""
    fresh: bool = True
    """Whether there may be others, although the draft made none since."""


@dataclass(frozen=True, slots=True)
class _DecodedPath:
    """One of the draft's guesses with those before it, from its root on: what they read like."""

    text: bytes
    ends: Sequence[tuple[int, float]]
    """After each guess, how long the text is, and the log-probability of the path."""
    final: bool
    """Whether a special token stands after the text."""
    last: int
    """The target's token that means the same as the last guess; -1: there is none."""

    def log_prob(self, length: int) -> float:
        """Of so many bytes."""
        return next(log_prob for reached, log_prob in self.ends if reached >= length)


class RetokenizedDraft(Speculator):
    """Method `draft_model` with `vocabulary_mapping` `strings`."""

    method = "draft_model"

    def __init__(self, inner: DraftModelSpeculator, mapping: VocabularyMapping) -> None:
        self.model = inner.model
        self.vocabulary_fingerprint = mapping.target.tokenizer.fingerprint
        self.vocabulary_size = mapping.target.size
        self.position_limit = inner.position_limit
        self._draft = inner
        self._mapping = mapping
        self._stable = StableTokens(mapping.target.tokenizer)
        self._requests: dict[int, _RetokenizedRequest] = {}

    @property
    def behind(self) -> bool:
        return self._draft.behind

    def open(self, opening: Opening) -> None:
        self.close(opening.request_id)
        self._check_known(opening.tokens)
        tree = TokenTree(len(opening.tokens) - 1, opening.tokens[-1])
        request = _RetokenizedRequest(opening, tree, DraftTranscript(self._mapping, opening.tokens))
        self._sync_draft(request)
        self._requests[opening.request_id] = request

    def commit(self, commit: Commit) -> None:
        request = self._requests.get(commit.request_id)
        if request is None:
            return
        if request.tree.position != commit.base_position:
            raise DraftError(f"the root is at {request.tree.position}, the commit at {commit.base_position}")
        self._check_known(commit.tokens)
        request.tree.commit(commit.tokens)
        request.transcript.extend(commit.tokens)
        self._sync_draft(request)

    def limit(self, limit: Limit) -> None:
        if request := self._requests.get(limit.request_id):
            request.opening = replace(
                request.opening,
                max_depth=limit.max_depth,
                max_nodes=limit.max_nodes,
                least_path_probability=limit.least_path_probability,
            )
            request.nodes_read = 0
            request.fresh = True
            depth, nodes = _draft_limits(limit.max_depth, limit.max_nodes)
            self._draft.limit(replace(limit, max_depth=depth, max_nodes=nodes))

    def close(self, request_id: int) -> None:
        self._draft.close(request_id)
        self._requests.pop(request_id, None)

    def grow(self) -> dict[int, Growth]:
        grown = self._draft.grow()
        fresh = {key: request for key, request in self._requests.items() if request.fresh or key in grown}
        read = {key: self._read(key, request) for key, request in fresh.items()}
        return {key: self._requests[key].tree.growth(nodes) for key, nodes in read.items() if nodes}

    def check_integrity(self) -> None:
        """See `BestFirstSpeculator`."""
        self._draft.check_integrity()

    def _check_known(self, tokens: Sequence[int]) -> None:
        if not all(0 <= token < self.vocabulary_size for token in tokens):
            raise DraftError(f"a token id is outside the target's vocabulary of {self.vocabulary_size}")

    def _sync_draft(self, request: _RetokenizedRequest) -> None:
        """Bring the draft to where the transcript is. What it has computed of the same tokens stays."""
        key, tokens = request.opening.request_id, request.transcript.tokens
        same = common_prefix_length(request.draft_tokens, tokens)
        if not same:
            self._draft.open(_draft_opening(request.opening, tokens))
        elif same < len(request.draft_tokens):
            self._draft.rewind(key, same)
        if 0 < same < len(tokens):
            self._draft.commit(Commit(key, same - 1, tokens[same:], 0))
        request.draft_tokens = tokens
        request.nodes_read = 0
        request.fresh = True

    def _read(self, key: int, request: _RetokenizedRequest) -> list[int]:
        """Take the draft's new guesses into the tree, likeliest first; return what is new there."""
        request.fresh = False
        tree = self._draft.tree(key)
        new = tree.nodes()[request.nodes_read :]
        request.nodes_read = tree.size
        added: list[int] = []
        for node in sorted(new, key=tree.path_log_probs.__getitem__, reverse=True):
            if reading := self._decode_path(tree, node):
                added += self._graft(request, reading)
        return added

    def _decode_path(self, tree: TokenTree, node: int) -> _DecodedPath | None:
        """None if there is a special token before it."""
        draft, path, tokens = self._mapping.draft.tokenizer, tree.path(node), tree.path_tokens(node)
        special = [token in draft.special_ids for token in tokens]
        if any(special[:-1]):
            return None
        pieces = [b"" if special[i] else draft.piece(token) for i, token in enumerate(tokens)]
        reached = zip(itertools.accumulate(map(len, pieces)), map(tree.path_log_probs.__getitem__, path), strict=True)
        return _DecodedPath(b"".join(pieces), list(reached), special[-1], self._mapping.target_ids[tokens[-1]])

    def _graft(self, request: _RetokenizedRequest, reading: _DecodedPath) -> list[int]:
        """Those tokens of the target's that are new in its tree."""
        pending = request.transcript.pending
        if not reading.text.startswith(pending):
            return []
        text, window = reading.text[len(pending) :], request.transcript.window
        written = self._stable.of(text, window, reading.last, final=reading.final)
        path = [(token, reading.log_prob(len(pending) + length)) for token, length in written]
        if reading.final and reading.last >= 0 and len(text) == (written[-1][1] if written else 0):
            path.append((reading.last, reading.ends[-1][1]))
        known = itertools.takewhile(lambda step: step[0] < self.vocabulary_size, path)
        return _add_path(request, list(known))


def _add_path(request: _RetokenizedRequest, path: Sequence[tuple[int, float]]) -> list[int]:
    """Guess these tokens, one after another, each with the log-probability of the path; return those that are new."""
    added: list[int] = []
    tree, opening = request.tree, request.opening
    parent, before = ROOT, 0.0
    for token, log_prob in path[: opening.max_depth]:
        known = tree.child(parent, token)
        if known is None:
            if tree.size >= opening.max_nodes:
                return added
            known = tree.add(parent, token, min(0.0, log_prob - before))
            added.append(known)
        parent, before = known, log_prob
    return added


def _draft_opening(opening: Opening, tokens: Sequence[int]) -> Opening:
    """What the draft itself is asked for."""
    depth, nodes = _draft_limits(opening.max_depth, opening.max_nodes)
    return replace(
        opening,
        tokens=tokens,
        output_tokens=0,
        sampling=GREEDY,
        strategy="coupled",
        max_depth=depth,
        max_nodes=nodes,
    )


def _draft_limits(max_depth: int, max_nodes: int) -> tuple[int, int]:
    """The last token of every path has to wait for the next one."""
    return DRAFT_TOKENS_PER_TARGET_TOKEN * max_depth + 1 if max_depth else 0, DRAFT_TOKENS_PER_TARGET_TOKEN * max_nodes
