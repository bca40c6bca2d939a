"""A speculator that knows the outputs and half of whose guesses are wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.config import EngineConfig, SpeculativeConfig
from paceline.core.growth import Growth
from paceline.core.tree import ROOT, TokenTree
from paceline.drafting import Commit, DraftDescription, Opening, Speculator

DEPTH = 4
WRONG = 50
"""Wrong tokens have an id below this one: every vocabulary has them."""


class HalfWrong(Speculator):
    """Guesses a known text with wrong siblings of every token; below every second root only wrong tokens."""

    description = DraftDescription("custom")

    def __init__(self, config: SpeculativeConfig, engine: EngineConfig) -> None:
        """`config.model`: a JSON file, a list of texts as token ids, prompt and output."""
        self._texts: list[list[int]] = json.loads(Path(config.model or "").read_text())
        self._random = random.Random(5)
        self._open: dict[int, tuple[TokenTree, list[int]]] = {}

    def open(self, opening: Opening) -> None:
        tokens = list(opening.tokens)
        text = next(each for each in self._texts if each[: len(tokens)] == tokens)
        self._open[opening.request_id] = TokenTree(len(tokens) - 1, tokens[-1]), text

    def commit(self, commit: Commit) -> None:
        self._open[commit.request_id][0].commit(commit.tokens)

    def close(self, request_id: int) -> None:
        self._open.pop(request_id, None)

    def grow(self) -> dict[int, Growth]:
        return {key: tree.growth(list(self._guesses(tree, text))) for key, (tree, text) in self._open.items()}

    def _guesses(self, tree: TokenTree, text: Sequence[int]) -> Iterator[int]:
        """New nodes, unless the root has children already."""
        if tree.size:
            return
        parent = ROOT
        for token in text[tree.position + 1 :][:DEPTH]:
            wrong = tree.add(parent, self._wrong(token), -0.1)
            yield wrong
            parent = wrong if tree.position % 2 else tree.add(parent, token, -0.1)
            if parent != wrong:
                yield parent

    def _wrong(self, token: int) -> int:
        return self._random.choice([each for each in range(WRONG) if each != token])
