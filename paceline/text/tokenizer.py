"""A model's tokenizer, read from its folder or GGUF file with `tokenizers` alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from paceline.gguf.gguf_file import GgufFile, is_gguf
from paceline.model_names import BrokenFileError, ModelNotFoundError, fake_vocabulary, json_object, resolve_model
from paceline.text.chat_template import DEFAULT, TOOL_USE, ChatTemplate, folder_templates, gguf_templates
from paceline.text.gguf_tokenizer import gguf_backend, gguf_special_tokens
from paceline.text.gguf_vocabulary import BYTE_LEVEL, gguf_vocabulary
from paceline.text.token_pieces import byte_level_pieces, is_byte_level, token_pieces

FAKE_MODEL_CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"

RELEASE_GIL_FROM = 4096
"""Characters or tokens from which on Python's global lock is released. `tokenizers` releases it for batches, but holds
it through a single text, which may take seconds."""


class TokenTexts(NamedTuple):
    """What the tokens of a vocabulary are as text. See `Tokenizer`, which has the same attributes."""

    pieces: list[bytes]
    special_ids: frozenset[int]


class Tokenizer:
    """Text to ids and back, and the chat template.

    Decoding here is of whole sequences; `paceline.text.Detokenizer` decodes as tokens arrive.
    """

    def __init__(
        self,
        backend: Backend,
        special_tokens: dict[str, str],
        chat_templates: Mapping[str, str] | str | None,
        fingerprint: str | None = None,
    ) -> None:
        """`special_tokens` by role: `bos_token`, `eos_token`, ... `chat_templates`: by name, or the only one.
        `fingerprint`: else the vocabulary's digest."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = special_tokens
        self.fingerprint = fingerprint or _digest(backend.get_vocab(with_added_tokens=True))
        """Equal for two tokenizers if and only if every id is the same token."""
        named = {DEFAULT: chat_templates} if isinstance(chat_templates, str) else chat_templates
        self._templates = dict(named or {})

    @classmethod
    def load(cls, model: str) -> Tokenizer:
        """The tokenizer of a model by name (see `paceline.model_names`). Raises `ModelNotFoundError` or `GgufError`;
        its chat templates are parsed when they are used."""
        location = resolve_model(model)
        if vocabulary := fake_vocabulary(location):
            size, fingerprint = vocabulary
            return cls(_numbers(size), {}, FAKE_MODEL_CHAT_TEMPLATE, fingerprint)
        return cls._from_gguf(GgufFile.open(location)) if is_gguf(location) else cls._from_folder(Path(location))

    @classmethod
    def _from_folder(cls, folder: Path) -> Tokenizer:
        config = _configuration(folder)
        return cls(_read_backend(folder), _named_tokens(config), folder_templates(folder, config))

    @classmethod
    def _from_gguf(cls, file: GgufFile) -> Tokenizer:
        fingerprint = _digest(gguf_vocabulary(file).ids)
        return cls(gguf_backend(file), gguf_special_tokens(file), gguf_templates(file), fingerprint)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """For chats without tools. Raises `ChatTemplateError` if it does not parse."""
        return self._named_template(DEFAULT)

    @cached_property
    def _tool_template(self) -> ChatTemplate | None:
        return self._named_template(TOOL_USE)

    def template_for(self, *, tools: bool) -> ChatTemplate | None:
        """The chat template of requests with or without tools: some models have one of their own for tools.

        Raises `ChatTemplateError` if it does not parse.
        """
        return (self._tool_template if tools else None) or self.chat_template

    def use_chat_template(self, given: str) -> None:
        """Take another chat template for all chats: by its name among the model's, or from a file.

        Raises ValueError if there is none, or `ChatTemplateError` if it does not parse.
        """
        if (source := self._templates.get(given)) is None:
            try:
                source = Path(given).read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                names = ", ".join(sorted(self._templates)) or "none"
                raise ValueError(
                    f"{given} is no file that can be read, nor a template of the model ({names})"
                ) from error
        self.chat_template, self._tool_template = ChatTemplate(source, self.special_tokens), None

    def _named_template(self, name: str) -> ChatTemplate | None:
        source = self._templates.get(name)
        return None if source is None else ChatTemplate(source, self.special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; `add_special_tokens` adds those that the model expects around a text, such as a BOS.

        Other threads run while a long text is encoded.
        """
        if len(text) < RELEASE_GIL_FROM:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def encode_fragment(self, text: str) -> list[int]:
        """Token ids of text inside other text: without a prefix, and with special tokens as plain text."""
        return self._fragment_encoder.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Other threads run while many tokens are decoded."""
        if len(tokens) < RELEASE_GIL_FROM:
            return self._backend.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        [text] = self._backend.decode_batch([list(tokens)], skip_special_tokens=skip_special_tokens)
        return text

    def token_string(self, token: int) -> str:
        """The vocabulary's own spelling of a token; "" for an unused id."""
        return self._backend.id_to_token(token) or ""

    def token_id(self, token: str) -> int | None:
        """The id of a token by the vocabulary's own spelling."""
        return self._backend.token_to_id(token)

    @cached_property
    def pieces(self) -> list[bytes]:
        """By token id, the bytes it adds to a text."""
        return token_pieces(self._backend)

    @cached_property
    def visible_pieces(self) -> list[bytes]:
        """As `pieces`, but special tokens add nothing."""
        pieces = self.pieces.copy()
        for token in self.special_ids:
            pieces[token] = b""
        return pieces

    @cached_property
    def longest_token(self) -> int | None:
        """Most characters of one token; None: unlimited, as when an unknown text becomes one token.

        A normalizer may halve the length of a text, as by composing accents.
        """
        model = self._backend.model
        if not isinstance(model, models.BPE) or (model.fuse_unk and not model.byte_fallback):
            return None
        return max(map(len, self.pieces), default=1) * (1 if self._backend.normalizer is None else 2)

    @cached_property
    def spaces_special_tokens(self) -> bool:
        """Whether special tokens in a text have spaces before them that are not their own."""
        spellings = ((self.piece(id_), self.token_string(id_).encode()) for id_ in self.special_ids)
        return any(piece.startswith(b" ") and not token.startswith(b" ") for piece, token in spellings)

    @cached_property
    def prefix_tokens(self) -> list[int]:
        """The special tokens that the model expects before a text, such as a BOS."""
        marked, bare = self.encode("a"), self.encode("a", add_special_tokens=False)
        starts = range(len(marked) - len(bare) + 1)
        return marked[: next((start for start in starts if marked[start : start + len(bare)] == bare), 0)]

    @cached_property
    def adds_prefix_space(self) -> bool:
        """Whether a text is encoded as if a space preceded it."""
        bare = self.encode("a", add_special_tokens=False)
        return b"".join(map(self.piece, bare)).startswith(b" ")

    @cached_property
    def _fragment_encoder(self) -> Backend:
        """The same tokenizer without a prefix before the text."""
        encoder = Backend.from_str(json.dumps(without_prefix_space(json.loads(self._backend.to_str()))))
        encoder.encode_special_tokens = True
        return encoder

    def prepare(self) -> None:
        """Compute the tables now. Raises ValueError if the tokenizer cannot decode incrementally, or
        `ChatTemplateError`."""
        _ = self.visible_pieces, self.longest_token, self.template_for(tools=False), self.template_for(tools=True)

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text; b"" for an id beyond the vocabulary."""
        return self.pieces[token] if token < len(self.pieces) else b""

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that control the model and are not text."""
        marked = {id_ for id_, token in self._backend.get_added_tokens_decoder().items() if token.special}
        named = (self._backend.token_to_id(token) for token in self.special_tokens.values())
        return frozenset(marked | {id_ for id_ in named if id_ is not None})


def token_texts(model: str) -> TokenTexts:
    """Of a model by name. A byte-level vocabulary is read without its tokenizer, which takes three times as long.

    Raises as `Tokenizer.load`, and ValueError if the tokenizer cannot decode token by token.
    """
    location = resolve_model(model)
    texts = _gguf_texts(GgufFile.open(location)) if is_gguf(location) else _folder_texts(Path(location))
    if texts is not None:
        return texts
    tokenizer = Tokenizer.load(model)
    return TokenTexts(tokenizer.pieces, tokenizer.special_ids)


def _gguf_texts(file: GgufFile) -> TokenTexts | None:
    vocabulary = gguf_vocabulary(file)
    if vocabulary.model != BYTE_LEVEL:
        return None
    special = frozenset(id_ for id_ in vocabulary.added.values() if vocabulary.is_special(id_))
    return TokenTexts(byte_level_pieces(vocabulary.ids), special)


def _folder_texts(folder: Path) -> TokenTexts | None:
    path = folder / "tokenizer.json"
    content = json_object(path) if path.is_file() else {}
    if not is_byte_level(content.get("decoder")) or not isinstance(content["model"].get("vocab"), dict):
        return None
    added = content.get("added_tokens", [])
    ids = content["model"]["vocab"] | {each["content"]: each["id"] for each in added}
    special = {each["content"] for each in added if each["special"]}
    special.update(_named_tokens(_configuration(folder)).values())
    return TokenTexts(byte_level_pieces(ids), frozenset(ids[token] for token in special if token in ids))


def vocabulary_fingerprint(model: str) -> str:
    """The fingerprint of a model's vocabulary, by the model's name. Raises `ModelNotFoundError` or `GgufError`."""
    location = resolve_model(model)
    if is_gguf(location):  # without the tokenizer, which takes longer
        return _digest(gguf_vocabulary(GgufFile.open(location)).ids)
    if vocabulary := fake_vocabulary(location):
        return vocabulary[1]
    return _digest(_read_backend(Path(location)).get_vocab(with_added_tokens=True))


def _digest(ids: Mapping[str, int]) -> str:
    pairs = [(id_, token) for token, id_ in sorted(ids.items(), key=itemgetter(1))]
    return sha256(json.dumps(pairs, separators=(",", ":")).encode()).hexdigest()


def _numbers(size: int) -> Backend:
    """The tokenizer of a model without weights: token i is the number i; any other text is token 0."""
    backend = Backend(models.WordLevel({str(id_): id_ for id_ in range(size)}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def _read_backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelNotFoundError(
            f"{folder} has no tokenizer.json: save the model's tokenizer there with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing more specific
        raise BrokenFileError(f"{path} cannot be read, download it again: {error}") from error


def _configuration(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; empty if there is none."""
    path = folder / "tokenizer_config.json"
    return json_object(path) if path.is_file() else {}


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The tokens that tokenizer_config.json names by role; older files put each into an object."""
    named = {}
    for role, token in config.items():
        content = token.get("content") if isinstance(token, dict) else token
        if role.endswith("_token") and isinstance(content, str):
            named[role] = content
    return named


Part = Mapping[str, Any]


def without_prefix_space(tokenizer: Part) -> dict[str, Any]:
    """The contents of a tokenizer.json, changed to encode text as if it followed other text."""
    normalizer, pre_tokenizer = tokenizer["normalizer"], tokenizer["pre_tokenizer"]
    return {
        **tokenizer,
        "normalizer": normalizer and _normalizer(normalizer),
        "pre_tokenizer": pre_tokenizer and _pre_tokenizer(pre_tokenizer),
    }


def _normalizer(part: Part) -> Part | None:
    """None if nothing remains."""
    if part["type"] == "Sequence":
        return {**part, "normalizers": [kept for each in part["normalizers"] if (kept := _normalizer(each))]}
    return None if part["type"] in ("Prepend", "Strip") else part


def _pre_tokenizer(part: Part) -> Part:
    if part["type"] == "Sequence":
        return {**part, "pretokenizers": [_pre_tokenizer(each) for each in part["pretokenizers"]]}
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    return {**part, "add_prefix_space": False} if part["type"] == "ByteLevel" else part


log = logging.getLogger(__name__)


def existing_ends(named: Sequence[int], vocabulary_size: int) -> list[int]:
    """Those of the vocabulary; the log names the others: a request that stops at one would be refused."""
    if unknown := [each for each in named if not 0 <= each < vocabulary_size]:
        log.warning(
            "eos_token_id names %s, which the vocabulary of %d tokens does not have: left out", unknown, vocabulary_size
        )
    return [each for each in named if 0 <= each < vocabulary_size]
