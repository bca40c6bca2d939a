"""Growth: new nodes of token trees, as they travel from drafts to targets.

A draft makes the growth of one request (`Growth`, by `TokenTree.growth`), frames and pipes carry that of many in flat
arrays (`GrowthBatch`), and the target grafts it request by request (`TokenTree.graft`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

ROOT_ID = 0
"""In growth, the parent id that names the committed token at the growth's base position."""

DraftDistribution = Mapping[int, int]
"""What a draft drew a guess from: tokens, each with a positive weight in proportion to which it is drawn. An empty one
stands for certainty: nothing but this guess could have come."""
CERTAIN_TOKEN: DraftDistribution = {}


@dataclass(slots=True)
class Growth:
    """New nodes as they travel from draft to target: parallel sequences, parents before children.

    The ids of the nodes count up from `first_id`. `laws`: the draft's law that each node was drawn from; empty if none
    is sent.
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
        """Raises ValueError if lengths differ, an id is not positive, a log-probability is not a number, or a node
        cannot have come from its law. What else a draft may get wrong (unknown parents, repeated ids) is no error:
        `TokenTree.graft` drops it."""
        lengths = {len(self.parent_ids), len(self.tokens), len(self.log_probs), len(self.distributions or self.tokens)}
        if len(lengths) > 1:
            raise ValueError(f"growth with sequences of lengths {sorted(lengths)}")
        if self.first_id <= ROOT_ID:
            raise ValueError("growth with a node id that is not positive")
        if any(map(math.isnan, self.log_probs)):
            raise ValueError("growth with a log-probability that is not a number")
        for token, law in zip(self.tokens, self.distributions, strict=False):
            if law and (token not in law or min(law.values()) <= 0):
                raise ValueError(f"growth with token {token} of a law that it cannot have been drawn from")
        return self


@dataclass(frozen=True, slots=True)
class GrowthBatch:
    """Growth of several requests as it travels: what is of nodes is in one array over the nodes of all."""

    headers: Sequence[tuple[int, int, int, int]] = field(default_factory=list)
    """Of each growth: its request, base position and first id, and how many nodes it has."""
    parent_ids: array[int] = field(default_factory=lambda: array("Q"))
    tokens: array[int] = field(default_factory=lambda: array("I"))
    log_probs: array[float] = field(default_factory=lambda: array("d"))
    distributions: Sequence[DraftDistribution] = field(default_factory=list)
    """One for each node, or none at all."""

    def __reduce__(self) -> tuple[type[GrowthBatch], tuple[object, ...]]:
        """What dataclasses have instead takes ten times as long."""
        return GrowthBatch, (self.headers, self.parent_ids, self.tokens, self.log_probs, self.distributions)

    @classmethod
    def of(cls, growths: Iterable[tuple[int, Growth]]) -> GrowthBatch:
        """In as few pieces as can be: growths of a request that follow one another become one."""
        by_request: dict[int, list[Growth]] = {}
        for request_id, growth in growths:
            by_request.setdefault(request_id, []).append(growth)
        ordered = [growth for its in by_request.values() for growth in its]
        return cls(
            [head for request_id, its in by_request.items() for head in _heads(request_id, its)],
            array("Q", chain.from_iterable(growth.parent_ids for growth in ordered)),
            array("I", chain.from_iterable(growth.tokens for growth in ordered)),
            array("d", chain.from_iterable(growth.log_probs for growth in ordered)),
            [law for growth in ordered for law in growth.distributions or [CERTAIN_TOKEN] * len(growth)]
            if any(any(growth.distributions) for growth in ordered)
            else [],
        )

    def __len__(self) -> int:
        """How many growths."""
        return len(self.headers)

    def __iter__(self) -> Iterator[tuple[int, Growth]]:
        """Each growth, with its request."""
        start = 0
        for request_id, base_position, first_id, count in self.headers:
            these = slice(start, start := start + count)
            laws = self.distributions[these]
            yield (
                request_id,
                Growth(
                    base_position,
                    first_id,
                    self.parent_ids[these].tolist(),
                    self.tokens[these].tolist(),
                    self.log_probs[these].tolist(),
                    laws if any(laws) else (),
                ),
            )


def _heads(request_id: int, growths: Sequence[Growth]) -> Iterator[tuple[int, int, int, int]]:
    first = growths[0]
    count = 0
    for growth in growths:
        if (growth.base_position, growth.first_id) != (first.base_position, first.first_id + count):
            yield request_id, first.base_position, first.first_id, count
            first, count = growth, 0
        count += len(growth)
    yield request_id, first.base_position, first.first_id, count
