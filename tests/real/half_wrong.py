"""A speculator that knows the outputs and half of whose guesses are wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.core.tree import ROOT, TokenTree
from paceline.drafting import Opening
from tests.helpers.replicas import Replicas

DEPTH = 4
WRONG = 50
"""Wrong tokens have an id below this one: every vocabulary has them."""


class HalfWrong(Replicas):
    """Guesses a known text with wrong siblings of every token; below every second root only wrong tokens."""

    def __init__(self, config: SpeculativeConfig, engine: EngineConfig) -> None:
        """`config.model`: a JSON file, a list of texts as token ids, prompt and output."""
        super().__init__()
        self._texts: list[list[int]] = json.loads(Path(config.model or "").read_text())
        self._random = random.Random(5)
        self._open: dict[int, list[int]] = {}

    def open(self, opening: Opening) -> None:
        super().open(opening)
        tokens = list(opening.tokens)
        self._open[opening.request_id] = next(each for each in self._texts if each[: len(tokens)] == tokens)

    def guesses(self, request_id: int, tree: TokenTree) -> Iterator[int]:
        """New nodes, unless the root has children already."""
        if tree.size:
            return
        parent = ROOT
        for token in self._open[request_id][tree.position + 1 :][:DEPTH]:
            wrong = tree.add(parent, self._wrong(token), -0.1)
            yield wrong
            parent = wrong if tree.position % 2 else tree.add(parent, token, -0.1)
            if parent != wrong:
                yield parent

    def _wrong(self, token: int) -> int:
        return self._random.choice([each for each in range(WRONG) if each != token])
