"""Growth: new nodes of token trees, on their way from drafts to targets.

A draft makes the growth of one request (`TokenTree.growth`). Frames and pipes carry the growth of many requests in flat
lists (`GrowthBatch`). The target grafts it request by request (`TokenTree.graft`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

ROOT_ID = 0
"""The parent id of the committed token at a growth's base position."""

DraftDistribution = Mapping[int, int]
"""The draft's distribution that a draft token was drawn from: a positive weight by token, not normalised."""
CERTAIN_TOKEN: DraftDistribution = {}
"""The draft token has probability 1."""


@dataclass(slots=True)
class Growth:
    """New nodes of one request: parallel sequences, parents before children.

    Node ids count up from `first_id`. `distributions`: what each token was drawn from; empty if none are sent.
    """

    base_position: int
    first_id: int
    parent_ids: Sequence[int]
    tokens: Sequence[int]
    log_probs: Sequence[float]
    distributions: Sequence[DraftDistribution] = ()

    def __len__(self) -> int:
        """How many nodes."""
        return len(self.tokens)

    @property
    def node_ids(self) -> range:
        return range(self.first_id, self.first_id + len(self.tokens))

    def check(self) -> Growth:
        """Return self, or raise ValueError.

        Raised if lengths differ, an id is not positive, a log-probability is NaN, or a token has no weight in its
        distribution. Unknown parents and repeated ids are no error: `TokenTree.graft` drops such nodes.
        """
        lengths = {len(self.parent_ids), len(self.tokens), len(self.log_probs), len(self.distributions or self.tokens)}
        if len(lengths) > 1:
            raise ValueError(f"growth with sequences of lengths {sorted(lengths)}")
        if self.first_id <= ROOT_ID:
            raise ValueError("growth with a node id that is not positive")
        if any(map(math.isnan, self.log_probs)):
            raise ValueError("growth with a log-probability that is not a number")
        for token, distribution in zip(self.tokens, self.distributions, strict=False):
            if distribution and (token not in distribution or min(distribution.values()) <= 0):
                raise ValueError(f"growth with token {token} that cannot have been drawn from its distribution")
        return self


@dataclass(frozen=True, slots=True)
class GrowthBatch:
    """Growth of several requests: flat lists over all their nodes."""

    headers: Sequence[tuple[int, int, int, int]] = field(default_factory=list)
    """(request, base position, first id, number of nodes) of each growth."""
    parent_ids: Sequence[int] = field(default_factory=list)
    tokens: Sequence[int] = field(default_factory=list)
    log_probs: Sequence[float] = field(default_factory=list)
    distributions: Sequence[DraftDistribution] = field(default_factory=list)
    """One for each node, or empty."""

    def __reduce__(self) -> tuple[type[GrowthBatch], tuple[object, ...]]:
        """Several times as fast as the default of dataclasses."""
        return GrowthBatch, (self.headers, self.parent_ids, self.tokens, self.log_probs, self.distributions)

    @classmethod
    def of(cls, growths: Iterable[tuple[int, Growth]]) -> GrowthBatch:
        """Batch growths by (request, growth). Consecutive growths of a request are merged."""
        by_request: dict[int, list[Growth]] = {}
        for request_id, growth in growths:
            by_request.setdefault(request_id, []).append(growth)
        ordered = list(chain.from_iterable(by_request.values()))
        return cls(
            [header for request_id, each in by_request.items() for header in _merged_headers(request_id, each)],
            list(chain.from_iterable(growth.parent_ids for growth in ordered)),
            list(chain.from_iterable(growth.tokens for growth in ordered)),
            list(chain.from_iterable(growth.log_probs for growth in ordered)),
            [each for growth in ordered for each in growth.distributions or [CERTAIN_TOKEN] * len(growth)]
            if any(any(growth.distributions) for growth in ordered)
            else [],
        )

    def __len__(self) -> int:
        """How many growths, after merging."""
        return len(self.headers)

    def __iter__(self) -> Iterator[tuple[int, Growth]]:
        """(request, growth) of each."""
        start = 0
        for request_id, base_position, first_id, count in self.headers:
            these = slice(start, start := start + count)
            distributions = self.distributions[these]
            yield (
                request_id,
                Growth(
                    base_position,
                    first_id,
                    self.parent_ids[these],
                    self.tokens[these],
                    self.log_probs[these],
                    distributions if any(distributions) else (),
                ),
            )


def _merged_headers(request_id: int, growths: Sequence[Growth]) -> Iterator[tuple[int, int, int, int]]:
    first = growths[0]
    count = 0
    for growth in growths:
        if (growth.base_position, growth.first_id) != (first.base_position, first.first_id + count):
            yield request_id, first.base_position, first.first_id, count
            first, count = growth, 0
        count += len(growth)
    yield request_id, first.base_position, first.first_id, count
