"""Two different tokenizers, and models for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import LlamaForCausalLM

from paceline.drafting.vocabulary.vocabulary_mapping import Vocabulary
from paceline.model.model import ModelOutput
from paceline.model.rows import Row
from paceline.text import Tokenizer
from tests.helpers.llamas import peaked_llama

TALE = (
    "the traveller said that he would return before the winter, but nobody in the village believed him; "
    "東京タワーは夜もあかるい。 Später fand man seinen Schlüssel — ein naïves Mädchen brachte ihn zurück! "
    "for i in range(10):\n    total += values[i]\n    print(total, end='')\nEverything else remained a mystery. "
)


def byte_level(size: int = 420, texts: Sequence[str] = (TALE,), added: Sequence[str] = ()) -> Tokenizer:
    """Like GPT-2: words include the space before, and any byte has a token. An end token, no begin token.

    `added`: tokens that are spelled outside the byte alphabet.
    """
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|end|>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens([AddedToken(token, special=False) for token in added])
    return Tokenizer(backend, {"eos_token": "<|end|>"}, None)


def metaspace(size: int = 340, texts: Sequence[str] = (TALE.partition("東")[0],)) -> Tokenizer:
    """Like Llama 2: `▁` for a space, a space before every text, a begin token, and a token for each byte."""
    special = ["<unk>", "<s>", "</s>"]
    single = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Backend(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size - 259, show_progress=False))
    learned: dict[str, Any] = json.loads(trained.to_str())["model"]
    words = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    vocabulary = {token: id_ for id_, token in enumerate([*special, *single, *words])}
    merges = [tuple(pair) for pair in learned["merges"]]
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(special)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, None)


def numbered(numbers: Sequence[int], name: str = "numbers") -> Vocabulary:
    """Token i reads as `numbers[i]`."""
    backend = Backend(models.WordLevel({str(number): i for i, number in enumerate(numbers)}, unk_token=str(numbers[0])))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return Vocabulary(name, Tokenizer(backend, {}, None), len(numbers))


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> bytes:
    return b"".join(tokenizer.piece(token) for token in tokens if token not in tokenizer.special_ids)


def vocabulary(tokenizer: Tokenizer, name: str = "tested", more: int = 0) -> Vocabulary:
    """A vocabulary whose model has `more` ids than the tokenizer."""
    return Vocabulary(name, tokenizer, len(tokenizer.pieces) + more)


def permuted_llama(numbers: Sequence[int]) -> LlamaForCausalLM:
    """The peaked Llama, with its token `numbers[i]` as token i."""
    network = peaked_llama()
    order = torch.tensor(numbers)
    with torch.no_grad():
        for weight in (network.get_input_embeddings().weight, network.get_output_embeddings().weight):
            weight.copy_(weight[order].clone())
    return network


class Reciter:
    """A model that repeats one text: it continues from where the last input occurs in the text."""

    def __init__(self, vocabulary: Vocabulary, text: str = TALE, slots: int = 2048, sure: float = 9.0) -> None:
        """`sure`: the logit of the next token; the others have 0."""
        self.name = vocabulary.name
        self.vocabulary_size = vocabulary.size
        self.max_model_len = 2000
        self.slots = slots
        self.eos_token_ids: Sequence[int] = ()
        self.fingerprint = vocabulary.tokenizer.fingerprint
        self.rows_invariant = True
        self.numerics = "no weights"
        self.asynchronous = False
        self.states = None
        self.ran: list[Row] = []
        self._tokenizer = vocabulary.tokenizer
        self._text = text.encode()
        self._sure = sure
        self._tokens = [0] * (slots + 1)

    def run(self, rows: Sequence[Row], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        self.ran += rows
        for row in rows:
            self._tokens[row.slot] = row.token
        logits = torch.zeros(len(wanted), self.vocabulary_size)
        for i, r in enumerate(wanted):
            logits[i, self._next(rows[r])] = self._sure
        return ModelOutput(logits)

    def target_weights(self) -> Any:
        raise ValueError("it has no weights")

    def _next(self, row: Row) -> int:
        """The first token of what follows; within a character, its next byte."""
        slots = row.path(max(0, row.position - 39))
        rest = self._after(b"".join(self._tokenizer.piece(self._tokens[slot]) for slot in slots))
        for size in range(40, 0, -1):
            with suppress(UnicodeDecodeError):
                return self._tokenizer.encode_fragment(rest[:size].decode())[0]
        return self._tokenizer.pieces.index(rest[:1])

    def _after(self, text: bytes) -> bytes:
        """What follows the longest end of `text` that is known."""
        for size in (24, 6, 2):
            if (at := (self._text * 2).find(text[-size:])) >= 0:
                return (self._text * 3)[at + len(text[-size:]) :]
        return self._text


def save(folder: Path, network: LlamaForCausalLM, tokenizer: Vocabulary) -> str:
    """A checkpoint of both."""
    network.generation_config.eos_token_id = network.config.eos_token_id = None
    network.save_pretrained(folder)
    tokenizer.tokenizer._backend.save(str(folder / "tokenizer.json"))
    return str(folder)
