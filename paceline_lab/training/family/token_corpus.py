"""The corpus as token ids, and the endless stream of training batches cut from it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from paceline_lab.training.family.docstring_chats import Chat, chats
from paceline_lab.training.family.family_tokenizer import END_OF_TEXT
from paceline_lab.training.family.stdlib_corpus import held_out_files, read_source, source_texts

Ids = NDArray[np.uint16]


def corpus_documents(tokenizer: PreTrainedTokenizerFast) -> list[Ids]:
    """Every source file and every rendered chat as ids, each ending with the end-of-text id."""
    return encode_documents(tokenizer, source_texts() + render_chats(tokenizer, chats()))


def held_out_documents(tokenizer: PreTrainedTokenizerFast) -> list[Ids]:
    """The held-out files as ids."""
    return encode_documents(tokenizer, [read_source(path) for path in held_out_files()])


def render_chats(tokenizer: PreTrainedTokenizerFast, conversations: Sequence[Chat]) -> list[str]:
    """The text the model reads for each chat."""
    return [str(tokenizer.apply_chat_template(chat, tokenize=False)) for chat in conversations]


def encode_documents(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[Ids]:
    """Ids of every text, end-of-text appended."""
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    encoded = tokenizer.backend_tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [np.array([*item.ids, end], dtype=np.uint16) for item in encoded]


def save_documents(path: Path, documents: Sequence[Ids]) -> None:
    """Write documents as one array and their lengths."""
    np.savez(path, ids=np.concatenate(documents), lengths=np.array([len(item) for item in documents]))


def load_documents(path: Path) -> list[Ids]:
    """Read a file that `save_documents` wrote."""
    with path.open("rb") as file, np.load(file) as stored:
        return np.split(stored["ids"], np.cumsum(stored["lengths"])[:-1])


def windows(documents: Sequence[Ids], length: int, seed: int) -> Tensor:
    """Shuffle documents, join them, and cut them into shuffled windows: int64 [windows, length + 1].

    Neighbouring windows share one id, so every token is predicted once.
    """
    rng = np.random.default_rng(seed)
    joined = np.concatenate([documents[i] for i in rng.permutation(len(documents))])
    count = (len(joined) - 1) // length
    if count == 0:
        raise ValueError(f"{len(joined)} tokens do not fill one window of {length + 1}")
    spare = len(joined) - 1 - count * length
    first = int(rng.integers(spare + 1))
    starts = first + length * rng.permutation(count)
    return torch.from_numpy(joined[starts[:, None] + np.arange(length + 1)].astype(np.int64))


@dataclass
class Position:
    """A position in a stream: `window` windows of `length` tokens were taken from epoch `epoch`."""

    epoch: int = 0
    length: int = 0
    window: int = 0


class Stream:
    """An endless stream of batches, epoch after epoch. The same seed and position always give the same batch.

    `cut(length, seed)` gives one epoch: int64 [rows, anything], shuffled by the seed.
    """

    def __init__(self, cut: Callable[[int, int], Tensor], seed: int) -> None:
        self.position = Position()
        self._cut = cut
        self._seed = seed
        self._epoch = torch.empty(0)
        self._cut_at: tuple[int, int] | None = None

    def batch(self, rows: int, length: int) -> Tensor:
        """The next `rows` rows. A new length starts a new epoch."""
        if self.position.length not in (0, length):
            self._next_epoch(length)
        self.position.length = length
        return torch.cat(list(self._take(rows)))

    def _take(self, rows: int) -> Iterator[Tensor]:
        while rows > 0:
            taken = self._current()[self.position.window :][:rows]
            if len(taken) == 0:
                self._next_epoch(self.position.length)
            self.position.window += len(taken)
            rows -= len(taken)
            yield taken

    def _next_epoch(self, length: int) -> None:
        self.position = Position(self.position.epoch + 1, length)

    def _current(self) -> Tensor:
        wanted = (self.position.epoch, self.position.length)
        if self._cut_at != wanted:
            self._epoch = self._cut(self.position.length, self._seed * 1_000_003 + self.position.epoch)
            self._cut_at = wanted
        return self._epoch


def corpus_stream(documents: Sequence[Ids], seed: int) -> Stream:
    """Windows of the documents: batches int64 [rows, length + 1]."""
    return Stream(partial(windows, documents), seed)
