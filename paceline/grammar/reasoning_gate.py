"""Where in an output a grammar begins, for a model that may reason before it answers. Needs no numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningGate:
    """Where in an output a grammar begins: behind the first `closing` tokens, or at once if there are none.

    `opening`: if it is given, there is reasoning only in an output that begins with this token.
    """

    closing: tuple[int, ...] = ()
    opening: int | None = None

    def grammar_start(self, output: Sequence[int]) -> int | None:
        """The index of the first token that the grammar applies to; None: the gate is closed.

        An empty output has its grammar at index 0 even if `opening` may still come.
        """
        if not self.closing or (self.opening is not None and tuple(output[:1]) != (self.opening,)):
            return 0
        first, size = self._first, len(self.closing)
        ends = range(first + size, len(output) + 1)
        return next((end for end in ends if tuple(output[end - size : end]) == self.closing), None)

    def next_opening(self, output: Sequence[int]) -> int | None:
        """The token that would open the reasoning as the next one; None: there is none, or it is too late."""
        return self.opening if self.closing and not output else None

    def last_tokens(self, output: Sequence[int]) -> tuple[int, ...]:
        """The tokens of the reasoning with which `closing` may have begun, at most all but its last one."""
        reasoning = tuple(output[self._first :])
        return reasoning[max(0, len(reasoning) - len(self.closing) + 1) :]

    @property
    def _first(self) -> int:
        """The index of the first token of the reasoning."""
        return 0 if self.opening is None else 1


ALWAYS = ReasoningGate()
"""The grammar begins with the output."""
