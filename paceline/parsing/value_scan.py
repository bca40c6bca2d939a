"""Where a value ends that arrives in parts, in JSON or in Python."""

from __future__ import annotations

from dataclasses import dataclass

NO_VALUE = "<`"
"""Characters that no value has outside quotes: they begin markers, so a model has left out closing brackets."""


@dataclass(slots=True)
class ValueScan:
    """Finds the end of a text in quotes, of brackets with what is in them, or of a word such as a number.

    `depth`: 1 if an opening bracket was seen before. Afterwards 0 says that all brackets are closed.
    """

    quotes: str = '"'
    depth: int = 0
    quote: str = ""
    """The quotes that the scan is in."""
    escaped: bool = False

    def find_end(self, text: str, start: int) -> tuple[int, bool]:
        """Where in this text the value ends, and whether it does. `start`: of what was not scanned before."""
        for index in range(start, len(text)):
            character = text[index]
            if self.quote:
                if self._in_quotes(character):
                    return index + 1, True
            elif character in self.quotes:
                self.quote = character
            elif character in "{[(":
                self.depth += 1
            elif character in "}])":
                self.depth -= 1
                if self.depth <= 0:
                    return index + (self.depth == 0), True
            elif character in NO_VALUE or (not self.depth and (character in ",:" or character.isspace())):
                return index, True
        return len(text), False

    def _in_quotes(self, character: str) -> bool:
        """Whether the value ends with this character of a text in quotes."""
        if self.escaped:
            self.escaped = False
        elif character == "\\":
            self.escaped = True
        elif character == self.quote:
            self.quote = ""
            return not self.depth
        return False
