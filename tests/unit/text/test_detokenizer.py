"""Detokenizer and tokenizer: what arrives token by token is what the tokenizer would have decoded at once."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from paceline.model_names import ModelNotFoundError, resolve_model
from paceline.text import Detokenizer, Tokenizer, vocabulary_fingerprint
from tests.helpers.vocabularies import byte_level, metaspace

TEXTS = ["def f(x):\n    return x", "naïve café — 東京は夜の七時", "👩‍👩‍👧‍👦 flags 🇩🇪 e\u0301", "\t \n\n  done"]
BYTE_LEVEL = byte_level(400, TEXTS * 3, added=["東京タワー"])
PYDOC = Tokenizer.load("pydoc")
SENTENCEPIECE = metaspace()
"""Like Llama 2's: ids 3 to 258 are bytes, words follow."""
THE = SENTENCEPIECE.pieces.index(b" the")
TABLE = Tokenizer.load("table:512")


def plain_metaspace() -> Tokenizer:
    vocabulary = {"<unk>": 0, "▁a": 1, "b": 2, "▁": 3, "ü": 4}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend, {}, None)


def cut(tokens: list[int], borders: list[int]) -> list[list[int]]:
    ends = [*sorted(border % (len(tokens) + 1) for border in borders), len(tokens)]
    return [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def stream(tokenizer: Tokenizer, parts: list[list[int]], *, skip_special_tokens: bool = True) -> str:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return "".join(detokenizer.feed(part) for part in parts) + detokenizer.flush()


def after(tokenizer: Tokenizer, first: int, tokens: list[int], *, skip_special_tokens: bool) -> str:
    """What `tokenizers` itself makes of tokens that follow another one."""
    whole = tokenizer.decode([first, *tokens], skip_special_tokens=skip_special_tokens)
    return whole.removeprefix(tokenizer.decode([first]))


@pytest.mark.parametrize(
    ("tokenizer", "first"),
    [(BYTE_LEVEL, 65), (plain_metaspace(), 1), (TABLE, 7)],
    ids=["byte_level", "metaspace", "table"],
)
@settings(deadline=None)
@given(data=st.data(), borders=st.lists(st.integers(0, 99), max_size=8), skip=st.booleans())
def test_any_cut_decodes_to_what_the_tokenizer_decodes(
    tokenizer: Tokenizer, first: int, data: st.DataObject, borders: list[int], skip: bool
) -> None:
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer.pieces) - 1), max_size=24))
    expected = after(tokenizer, first, tokens, skip_special_tokens=skip)
    assert stream(tokenizer, cut(tokens, borders), skip_special_tokens=skip) == expected


@settings(deadline=None)
@given(
    pieces=st.lists(st.one_of(st.sampled_from([*range(259, 340), 1]), st.characters(codec="utf-8"))),
    borders=st.lists(st.integers(0, 99), max_size=8),
)
def test_byte_tokens_decode_to_what_the_tokenizer_decodes(pieces: list[int | str], borders: list[int]) -> None:
    tokens: list[int] = []
    for piece in pieces:
        tokens += [piece] if isinstance(piece, int) else [3 + byte for byte in piece.encode()]
    expected = after(SENTENCEPIECE, THE, tokens, skip_special_tokens=True)
    assert stream(SENTENCEPIECE, cut(tokens, borders)) == expected


@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 270)), borders=st.lists(st.integers(0, 99), max_size=8))
def test_invalid_byte_tokens_spoil_no_others(tokens: list[int], borders: list[int]) -> None:
    expected = b"".join(SENTENCEPIECE.visible_pieces[token] for token in tokens).decode(errors="replace")
    assert stream(SENTENCEPIECE, cut(tokens, borders)) == expected


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, PYDOC], ids=["byte_level", "pydoc"])
def test_no_half_character_is_ever_shown(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer)
    shown = [detokenizer.feed([token]) for token in tokenizer.encode(text)]
    assert "".join(shown) == text
    assert "\ufffd" not in "".join(shown)


def test_an_incomplete_character_is_marked_at_the_end() -> None:
    euro = [3 + byte for byte in "€".encode()]
    detokenizer = Detokenizer(SENTENCEPIECE)
    assert detokenizer.feed(euro[:2]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_ids_beyond_the_vocabulary_stand_for_nothing() -> None:
    assert Detokenizer(TABLE).feed([1, 100_000, 2]) == " 1 2"


LONG_TEXT = "def area(width, height):\n    return width * height\n" * 5000


def test_long_texts_are_encoded_and_decoded_as_short_ones_are() -> None:
    tokens = PYDOC.encode(LONG_TEXT)
    assert tokens == PYDOC._backend.encode(LONG_TEXT).ids
    assert PYDOC.decode(tokens) == PYDOC._backend.decode(tokens) == LONG_TEXT


def test_other_threads_go_on_while_a_long_text_is_encoded() -> None:
    """It once stopped all of them for seconds, in whatever thread it was."""
    PYDOC.encode(LONG_TEXT[:10_000])  # its threads are started
    encoding = threading.Thread(target=PYDOC.encode, args=(LONG_TEXT,))
    encoding.start()
    turns = 0
    while encoding.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 5


def test_a_continuation_keeps_its_leading_space() -> None:
    assert Detokenizer(SENTENCEPIECE).feed([THE]) == " the"


def test_fingerprints_differ_exactly_with_the_meaning_of_ids(tmp_path: Path) -> None:
    def fingerprint(**more: int) -> str:
        backend = Backend(models.WordLevel({"<unk>": 0, "a": 1, "b": 2} | more, unk_token="<unk>"))
        backend.save(str(tmp_path / "tokenizer.json"))
        return vocabulary_fingerprint(str(tmp_path))

    (tmp_path / "config.json").write_text("{}")
    assert fingerprint() == fingerprint(b=2)
    assert len({fingerprint(), fingerprint(a=2, b=1), fingerprint(c=3)}) == 3


def test_the_shipped_pair_shares_a_vocabulary() -> None:
    assert vocabulary_fingerprint("pydoc") == vocabulary_fingerprint("pydoc-draft")


@pytest.mark.parametrize("name", ["/no/such/model", "table:", "table:one", "table:1"])
def test_a_missing_model_is_an_error_with_advice(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"a model is a GGUF file, a folder with|write table:"):
        resolve_model(name)


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [(None, "save_pretrained"), ("{", r"tokenizer.json cannot be read")],
    ids=["none", "broken"],
)
def test_a_folder_without_a_usable_tokenizer_is_an_error_with_advice(
    tokenizer: str | None, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    if tokenizer:
        (tmp_path / "tokenizer.json").write_text(tokenizer)
    with pytest.raises(ModelNotFoundError, match=message):
        Tokenizer.load(str(tmp_path))


def test_table_models_read_and_write_numbers() -> None:
    tokens = TABLE.encode("5 17 511")
    assert tokens == [5, 17, 511]
    assert Detokenizer(TABLE).feed(tokens) == " 5 17 511"
    assert TABLE.fingerprint == Tokenizer.load("table:512:0.1").fingerprint == "table:512"


def test_special_tokens_are_read_from_either_file(tmp_path: Path) -> None:
    """Older configurations wrap a token in an object; a token named by role is special whatever its own flag."""
    (tmp_path / "config.json").write_text("{}")
    backend = Backend(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3}, unk_token="<unk>"))
    backend.add_special_tokens(["<s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    named = {"eos_token": {"content": "</s>", "lstrip": False}, "bos_token": "<s>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    tokenizer = Tokenizer.load(str(tmp_path))
    assert tokenizer.special_tokens == {"eos_token": "</s>", "bos_token": "<s>"}
    assert tokenizer.special_ids == {1, 2}
