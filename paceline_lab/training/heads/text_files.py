"""Training text from a user's files, as ids of the target's tokenizer.

`.jsonl`: one JSON object per line, with `messages` (a chat), `prompt` and `completion`, or `text`. `.txt`, `.md` and
`.py`: one document. `.npz`: written by `paceline_lab.training.family.token_corpus.save_documents`. Text is UTF-8.
"""

import json
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.text import ChatTemplate, ChatTemplateError, Tokenizer
from paceline_lab.training.family.token_corpus import Ids, load_documents

PLAIN = (".txt", ".md", ".py")


class TextError(ValueError):
    """A file without usable training text."""


def read_documents(paths: Sequence[Path], model: str, end: Sequence[int]) -> list[Ids]:
    """Every document of these files; `end` ends each text. Raises `TextError`, or OSError for a missing file."""
    tokenizer = Tokenizer.load(model)
    return [document for path in paths for document in _documents(path, tokenizer, end)]


def divided(documents: Sequence[Ids], share: float = 0.02, most: int = 64) -> tuple[list[Ids], list[Ids]]:
    """Training documents, and every n-th held out: about `share` of them, at least one, not more than `most`."""
    count = min(most, max(1, round(len(documents) * share)))
    if count >= len(documents):
        raise TextError(f"{len(documents)} documents cannot be divided: give more of them, or some with --held-out")
    held_out = {int((n + 0.5) * len(documents) / count) for n in range(count)}
    kept = [document for n, document in enumerate(documents) if n not in held_out]
    return kept, [documents[n] for n in sorted(held_out)]


def _documents(path: Path, tokenizer: Tokenizer, end: Sequence[int]) -> list[Ids]:
    if path.suffix == ".npz":
        return _stored(path)
    texts = _texts(path, tokenizer.chat_template)
    return [np.array([*tokenizer.encode(text, add_special_tokens=False), *end], dtype=np.int32) for text in texts]


def _stored(path: Path) -> list[Ids]:
    try:
        return load_documents(path)
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise TextError(f"{path}: not what save_documents writes ({error})") from error


def _texts(path: Path, template: ChatTemplate | None) -> Iterator[str]:
    if path.suffix not in (".jsonl", *PLAIN):
        raise TextError(f"{path}: text to train on is in .jsonl, .npz, {', '.join(PLAIN)} files")
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"{path}: not UTF-8 ({error})") from error
    if path.suffix in PLAIN:
        yield content
        return
    for number, line in enumerate(content.split("\n"), 1):  # a JSON string may contain other line ends
        if line.strip():
            yield _text(f"{path}, line {number}", line, template)


def _text(source: str, line: str, template: ChatTemplate | None) -> str:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise TextError(f"{source}: no JSON ({error})") from error
    match entry:
        case {"messages": [*messages]} if template is not None:
            return _chat(source, messages, template)
        case {"prompt": str(prompt), "completion": str(completion)}:
            return prompt + completion
        case {"text": str(text)}:
            return text
    raise TextError(f"{source}: needs `text`, `prompt` and `completion`, or `messages` and a chat template")


def _chat(source: str, messages: Sequence[Any], template: ChatTemplate) -> str:
    try:
        return template.render(messages, add_generation_prompt=False)
    except ChatTemplateError as error:
        raise TextError(f"{source}: the chat template refuses it ({error})") from error
