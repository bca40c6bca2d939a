"""Drafting with a model of another vocabulary, by retokenizing the text that it drafts (SLEM, UAG).

The model drafts in its own vocabulary, as for a request of its own. The text of its paths is encoded with the target's
tokenizer, into a tree of the target's tokens. Committed tokens are encoded with the draft's tokenizer; where that
changes the encoding of earlier text, the draft is rewound to the common prefix.

The target's noise means nothing in another vocabulary, so the draft is greedy at every temperature.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paceline.config import SamplingParams
from paceline.core.growth import Growth
from paceline.core.tree import ROOT, TokenTree
from paceline.drafting.best_first import BestFirstRequest
from paceline.drafting.network_speculator import NetworkSpeculator
from paceline.drafting.speculator import Commit, Limit, Opening
from paceline.drafting.tree_speculator import TreeRequest, TreeSpeculator
from paceline.drafting.vocabulary.draft_transcript import DraftTranscript
from paceline.drafting.vocabulary.stable_tokens import StableTokens, common_prefix_length
from paceline.drafting.vocabulary.vocabulary_mapping import VocabularyMapping

GREEDY = SamplingParams(temperature=0.0)
DRAFT_TOKENS_PER_TARGET_TOKEN = 2
"""The draft's limits are this multiple of the request's."""


@dataclass(slots=True, eq=False)
class _RetokenizedRequest(TreeRequest):
    """`tree` has the target's tokens."""

    transcript: DraftTranscript
    draft_tokens: list[int] = field(default_factory=list)
    """The committed tokens of the draft's request. The last one is its root."""
    nodes_read: int = 0
    """Nodes of the draft's tree whose paths are in `tree`, as far as they can be."""
    fresh: bool = True
    """Whether the draft's nodes may give new ones although no new one was drafted."""

    def add_path(self, path: Sequence[tuple[int, float]]) -> list[int]:
        """Add these tokens one below the other, each with the path's log-probability; return the new nodes."""
        new: list[int] = []
        parent, before = ROOT, 0.0
        for token, log_prob in path[: self.opening.max_depth]:
            node = self.tree.child(parent, token)
            if node is None:
                if not self.nodes_left:
                    return new
                node = self.tree.add(parent, token, min(0.0, log_prob - before))
                new.append(node)
            parent, before = node, log_prob
        return new


@dataclass(frozen=True, slots=True)
class _DecodedPath:
    """The text of a path in the draft's tree."""

    text: bytes
    ends: Sequence[tuple[int, float]]
    """After each token: the length of the text, and the path's log-probability."""
    final: bool
    """Whether a special token follows the text."""
    last: int
    """The target's token with the meaning of the last draft token; -1: there is none."""

    def log_prob(self, length: int) -> float:
        """Of the path that gives the first `length` bytes."""
        return next(log_prob for end, log_prob in self.ends if end >= length)


class RetokenizingSpeculator(TreeSpeculator[_RetokenizedRequest]):
    """Method `draft_model` with `vocabulary_mapping` `strings`."""

    def __init__(self, inner: NetworkSpeculator[BestFirstRequest], mapping: VocabularyMapping) -> None:
        target = mapping.target
        super().__init__(
            replace(
                inner.description,
                vocabulary_fingerprint=target.tokenizer.fingerprint,
                vocabulary_size=target.size,
            )
        )
        self._draft = inner
        self._mapping = mapping
        self._stable = StableTokens(mapping.target.tokenizer)

    @property
    def behind(self) -> bool:
        return self._draft.behind

    def new_request(self, opening: Opening, tree: TokenTree) -> _RetokenizedRequest:
        request = _RetokenizedRequest(opening, tree, DraftTranscript(self._mapping, opening.tokens))
        self._sync_draft(request)
        return request

    def advance(self, request: _RetokenizedRequest, commit: Commit) -> None:
        request.tree.commit(commit.tokens)
        request.transcript.extend(commit.tokens)
        self._sync_draft(request)

    def limits_changed(self, request: _RetokenizedRequest) -> None:
        request.nodes_read = 0
        request.fresh = True
        opening = request.opening
        depth, nodes = _draft_limits(opening.max_depth, opening.max_nodes)
        self._draft.limit(Limit(opening.request_id, depth, nodes, opening.least_path_probability))

    def release(self, request: _RetokenizedRequest) -> None:
        self._draft.close(request.opening.request_id)

    def grow(self) -> dict[int, Growth]:
        grown = self._draft.grow()
        fresh = {key: request for key, request in self._requests.items() if request.fresh or key in grown}
        return self._growths({key: self._read(key, request) for key, request in fresh.items()})

    def check_integrity(self) -> None:
        """See `NetworkSpeculator`."""
        self._draft.check_integrity()

    def _sync_draft(self, request: _RetokenizedRequest) -> None:
        """Bring the draft's request to the tokens of the transcript. A common prefix stays computed."""
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
        """Add the paths of the draft's new nodes to the tree, likeliest first; return the new nodes."""
        request.fresh = False
        tree = self._draft.tree(key)
        unread = tree.nodes()[request.nodes_read :]
        request.nodes_read = tree.size
        new: list[int] = []
        for node in sorted(unread, key=tree.path_log_probs.__getitem__, reverse=True):
            if decoded := self._decode_path(tree, node):
                new += request.add_path(self._target_path(request, decoded))
        return new

    def _decode_path(self, tree: TokenTree, node: int) -> _DecodedPath | None:
        """The text of the path to `node`; None if a special token precedes `node`."""
        tokenizer, path, tokens = self._mapping.draft.tokenizer, tree.path(node), tree.path_tokens(node)
        special = [token in tokenizer.special_ids for token in tokens]
        if any(special[:-1]):
            return None
        pieces = [b"" if special[i] else tokenizer.piece(token) for i, token in enumerate(tokens)]
        ends = zip(itertools.accumulate(map(len, pieces)), map(tree.path_log_probs.__getitem__, path), strict=True)
        return _DecodedPath(b"".join(pieces), list(ends), special[-1], self._mapping.target_ids[tokens[-1]])

    def _target_path(self, request: _RetokenizedRequest, decoded: _DecodedPath) -> list[tuple[int, float]]:
        """The target's tokens for a decoded path, each with the path's log-probability."""
        pending = request.transcript.pending
        if not decoded.text.startswith(pending):
            return []
        text, window = decoded.text[len(pending) :], request.transcript.window
        stable = self._stable.of(text, window, decoded.last, final=decoded.final)
        path = [(token, decoded.log_prob(len(pending) + length)) for token, length in stable]
        if decoded.final and decoded.last >= 0 and len(text) == (stable[-1][1] if stable else 0):
            path.append((decoded.last, decoded.ends[-1][1]))
        return list(itertools.takewhile(lambda step: step[0] < self.description.vocabulary_size, path))


def _draft_opening(opening: Opening, tokens: Sequence[int]) -> Opening:
    """The draft's own request."""
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
    """One token deeper: the last token of a path is only stable once the next one is known."""
    return DRAFT_TOKENS_PER_TARGET_TOKEN * max_depth + 1 if max_depth else 0, DRAFT_TOKENS_PER_TARGET_TOKEN * max_nodes
