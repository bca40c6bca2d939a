"""Which request is in which row of vLLM's batch.

A proposer is not told: it sees rows of token ids, which vLLM moves, ends and replaces as it likes. So a row is
recognised by how many tokens it has and by its last ones. Two requests of one cache salt that agree in these can be
taken for one another, which costs guesses and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.config import SamplingParams, SpeculativeOptions
from paceline.engine.drafted_request import DraftedRequest

TokenIds: TypeAlias = npt.NDArray[np.int32]

COMPARED_TOKENS = 64
"""The last tokens of a row, by which it is recognised."""
MAX_ABSENT_STEPS = 50
"""A request without a row is forgotten after so many steps: it was preempted or waits, or it has ended."""

TREE_NODES = 8
"""Of a tree, for each draft token of a step. The draft grows it before it knows which path the step commits."""


@dataclass(frozen=True, slots=True)
class RowDescription:
    """How the tokens of one row of a batch are drawn. `CoupledWorker`, which knows its request, tells a proposer."""

    params: SamplingParams
    prompt_tokens: int | None = None
    """Tokens of the row before its output; None: unknown."""
    speculative: SpeculativeOptions = field(default_factory=SpeculativeOptions)
    cache_salt: str = ""
    """See `GenerationRequest`."""


class ChainRequest(DraftedRequest):
    """A request of which a step verifies one path: vLLM has no trees."""

    def __init__(self, *arguments: Any, addresses: Callable[[], Sequence[str]], **others: Any) -> None:
        """As `DraftedRequest`; `addresses`: of draft workers, best first, asked whenever it needs one."""
        super().__init__(*arguments, **others)
        self.row = -1
        """Its last row."""
        self.absent_steps = 0
        self._addresses = addresses

    @property
    def draft_addresses(self) -> Sequence[str]:
        return self._addresses()

    @property
    def max_tree_nodes(self) -> int:
        return TREE_NODES * self.max_nodes

    def begins(self, tokens: TokenIds, cache_salt: str) -> bool:
        """Whether a row with these tokens goes on from the request's, by its salt and its last tokens."""
        count = len(self.tokens)
        return (
            cache_salt == self.generation_request.cache_salt
            and count <= len(tokens)
            and tokens[max(0, count - COMPARED_TOKENS) : count].tolist() == self.tokens[-COMPARED_TOKENS:]
        )

    def candidate_nodes(self) -> Sequence[int]:
        """The likeliest path, from the root down."""
        depth, tree = self.depth_allowed(), self.tree
        path: list[int] = []
        last = 0
        for node in tree.best(tree.size, depth) if depth > 0 else ():
            if tree.parents[node] == last:  # best first: the likeliest child comes before its siblings
                path.append(node)
                last = node
        return path


class Batch:
    """The requests of the current rows, and requests without a row since at most `MAX_ABSENT_STEPS` steps."""

    def __init__(self, open_request: Callable[[int, TokenIds], ChainRequest], salt_of: Callable[[int], str]) -> None:
        """`open_request` makes the request of a row, by its number and tokens, that no known request can have.
        `salt_of`: the cache salt of a row's request."""
        self.requests: dict[int, ChainRequest] = {}
        """By key."""
        self._last_rows: list[ChainRequest] = []
        """The request of each row of the last step."""
        self._open_request = open_request
        self._salt_of = salt_of

    def update(
        self, sampled: Sequence[Sequence[int]], lengths: TokenIds, token_ids: TokenIds
    ) -> tuple[list[tuple[ChainRequest, list[int]]], list[ChainRequest]]:
        """The request of each row with the tokens that it lacks, and the requests that are forgotten.

        `sampled`: the tokens that the last step drew for each row. `lengths`: tokens of each row, these included.
        `token_ids`: [rows or more, positions].
        """
        absent = dict(self.requests)
        rows = []
        for row, drawn in enumerate(sampled):
            tokens = token_ids[row, : lengths[row]]
            request = self._recognise(absent, row, tokens[: len(tokens) - len(drawn)])
            if request is None:
                request = self._open_request(row, tokens)
                self.requests[request.key] = request
            else:
                del absent[request.key]
            rows.append((request, tokens[len(request.tokens) :].tolist()))
            request.row, request.absent_steps = row, 0
        self._last_rows = [request for request, _ in rows]
        return rows, self._forget_absent(absent.values())

    def _recognise(self, known: Mapping[int, ChainRequest], row: int, tokens: TokenIds) -> ChainRequest | None:
        """The one of these requests, by key, that has these tokens, by preference the one that had this row; else the
        one that had this row and has only the first of them: vLLM asks for no drafts while any request is near its
        end."""
        if not (count := len(tokens)):
            return None
        salt = self._salt_of(row)
        if row < len(self._last_rows):
            last = self._last_rows[row]
            if last.key in known and len(last.tokens) == count and last.begins(tokens, salt):
                return last
        same = (each for each in known.values() if len(each.tokens) == count and each.begins(tokens, salt))
        shorter = (each for each in known.values() if each.row == row and each.begins(tokens, salt))
        return next(chain(same, shorter), None)

    def _forget_absent(self, absent: Iterable[ChainRequest]) -> list[ChainRequest]:
        for request in absent:
            request.absent_steps += 1
        forgotten = [request for request in absent if request.absent_steps > MAX_ABSENT_STEPS]
        for request in forgotten:
            del self.requests[request.key]
        return forgotten
