"""What suffix decoding remembers of requests that have finished."""

from __future__ import annotations

from collections import OrderedDict, deque
from functools import partial

from paceline.drafting.methods.suffix_tree import SuffixTree

MOST_CACHED_TOKENS = 500_000
"""Over all finished requests, whatever their number: some 220 bytes each."""


class FinishedOutputs:
    """Counts over the outputs of the requests that finished last."""

    def __init__(self, depth: int, width: int, requests: int, tokens: int = MOST_CACHED_TOKENS) -> None:
        """At most so many requests, and so many tokens of theirs."""
        self.tree = SuffixTree(depth, width)
        self.tokens = 0
        """How many are kept."""
        self._outputs: deque[list[int]] = deque()
        self._most_requests = requests
        self._most_tokens = tokens

    @property
    def requests(self) -> int:
        return len(self._outputs)

    def add(self, output: list[int]) -> None:
        """The oldest ones make room. One that is too long alone is not kept."""
        if not output or not self._most_requests or len(output) > self._most_tokens:
            return
        while self.requests == self._most_requests or self.tokens + len(output) > self._most_tokens:
            self.forget()
        self._outputs.append(output)
        self.tokens += len(output)
        self.tree.add(output)

    def forget(self) -> None:
        """The oldest one."""
        oldest = self._outputs.popleft()
        self.tree.remove(oldest)
        self.tokens -= len(oldest)


class OutputsBySalt:
    """`FinishedOutputs` for each cache salt. Together they keep no more than one may; where a salt was not used for
    longest, its oldest make room."""

    def __init__(self, depth: int, width: int, requests: int, tokens: int = MOST_CACHED_TOKENS) -> None:
        self._new = partial(FinishedOutputs, depth, width, requests, tokens)
        self._most_requests = requests
        self._most_tokens = tokens
        self._by_salt: OrderedDict[str, FinishedOutputs] = OrderedDict()
        self._requests = 0
        self._tokens = 0

    def tree(self, salt: str) -> SuffixTree | None:
        """Counts over what requests of this salt were answered; None if nothing is known of any."""
        if salt not in self._by_salt:
            return None
        self._by_salt.move_to_end(salt)
        return self._by_salt[salt].tree

    def add(self, output: list[int], salt: str) -> None:
        if not output or not self._most_requests or len(output) > self._most_tokens:
            return
        while self._requests == self._most_requests or self._tokens + len(output) > self._most_tokens:
            self._forget()
        outputs = self._by_salt.setdefault(salt, self._new())
        self._by_salt.move_to_end(salt)
        outputs.add(output)
        self._requests += 1
        self._tokens += len(output)

    def _forget(self) -> None:
        salt, outputs = next(iter(self._by_salt.items()))
        before = outputs.tokens
        outputs.forget()
        self._requests -= 1
        self._tokens -= before - outputs.tokens
        if not outputs.requests:
            del self._by_salt[salt]
