"""The outputs of finished requests, which suffix decoding looks up for later ones."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from paceline.drafting.methods.suffix_tree import SuffixTree

MOST_CACHED_TOKENS = 500_000
"""Over all outputs; a token takes about 220 bytes."""


@dataclass(slots=True)
class _SaltOutputs:
    tree: SuffixTree
    outputs: deque[list[int]] = field(default_factory=deque)
    """Oldest first."""


class FinishedOutputs:
    """Keeps the latest outputs, and counts their strings apart for each cache salt.

    When there are too many, the salt that was not used for longest loses its oldest output.
    """

    def __init__(self, depth: int, width: int, requests: int, tokens: int = MOST_CACHED_TOKENS) -> None:
        """`depth` and `width`: see `SuffixTree`. `requests` and `tokens`: most to keep."""
        self._depth, self._width = depth, width
        self._most_requests, self._most_tokens = requests, tokens
        self._by_salt: OrderedDict[str, _SaltOutputs] = OrderedDict()
        """The salt that was used last is last."""
        self._requests = 0
        self._tokens = 0

    def tree(self, salt: str) -> SuffixTree | None:
        """The counts of this salt's outputs; None if there are none."""
        if salt not in self._by_salt:
            return None
        self._by_salt.move_to_end(salt)
        return self._by_salt[salt].tree

    def add(self, output: list[int], salt: str) -> None:
        """Keep an output, unless it is empty or longer than all that may be kept."""
        if not output or not self._most_requests or len(output) > self._most_tokens:
            return
        while self._requests == self._most_requests or self._tokens + len(output) > self._most_tokens:
            self._forget()
        if salt not in self._by_salt:
            self._by_salt[salt] = _SaltOutputs(SuffixTree(self._depth, self._width))
        self._by_salt.move_to_end(salt)
        self._by_salt[salt].outputs.append(output)
        self._by_salt[salt].tree.add(output)
        self._requests += 1
        self._tokens += len(output)

    def _forget(self) -> None:
        salt, oldest = next(iter(self._by_salt.items()))
        output = oldest.outputs.popleft()
        oldest.tree.remove(output)
        self._requests -= 1
        self._tokens -= len(output)
        if not oldest.outputs:
            del self._by_salt[salt]
