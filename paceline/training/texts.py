"""Text to train on, from whatever files a user has, as ids of the target's tokenizer.

`.jsonl`: one JSON object per line, with `messages` (a chat), `prompt` and `completion`, or `text`. `.txt`, `.md` and
`.py`: one document. `.npz`: what `paceline.training.tokens.save_documents` wrote.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.text import Tokenizer
from paceline.training.tokens import Ids, load_documents

PLAIN = (".txt", ".md", ".py")


class TextError(ValueError):
    """A file that cannot be trained on; the text says what it should be."""


def read_documents(paths: Sequence[Path], model: str, end: int) -> list[Ids]:
    """Every document of these files, `end` appended to each. Raises `TextError`."""
    tokenizer = Tokenizer.load(model)
    return [document for path in paths for document in _documents(path, tokenizer, end)]


def divided(documents: Sequence[Ids], share: float = 0.02, most: int = 64) -> tuple[list[Ids], list[Ids]]:
    """Documents to learn from, and every n-th of them held out: about `share`, at least one, not more than `most`."""
    count = min(most, max(1, round(len(documents) * share)))
    if count >= len(documents):
        raise TextError(f"{len(documents)} documents cannot be divided: give more of them, or some with --held-out")
    held_out = {round((n + 0.5) * len(documents) / count) for n in range(count)}
    kept = [document for n, document in enumerate(documents) if n not in held_out]
    return kept, [documents[n] for n in sorted(held_out)]


def _documents(path: Path, tokenizer: Tokenizer, end: int) -> Iterator[Ids]:
    if path.suffix == ".npz":
        yield from load_documents(path)
    elif path.suffix == ".jsonl":
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield _ids(tokenizer, _text(path, number, line, tokenizer), end)
    elif path.suffix in PLAIN:
        yield _ids(tokenizer, path.read_text(), end)
    else:
        raise TextError(f"{path}: text to train on is in .jsonl, .npz, {', '.join(PLAIN)} files")


def _ids(tokenizer: Tokenizer, text: str, end: int) -> Ids:
    return np.array([*tokenizer.encode(text, add_special_tokens=False), end], dtype=np.int32)


def _text(path: Path, number: int, line: str, tokenizer: Tokenizer) -> str:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise TextError(f"{path}, line {number}: no JSON ({error})") from error
    match entry:
        case {"messages": [*messages]} if tokenizer.chat_template is not None:
            return tokenizer.chat_template.render(messages, add_generation_prompt=False)
        case {"prompt": str(prompt), "completion": str(completion)}:
            return prompt + completion
        case {"text": str(text)}:
            return text
    raise TextError(
        f"{path}, line {number}: needs `text`, `prompt` and `completion`, or `messages` and a chat template"
    )
