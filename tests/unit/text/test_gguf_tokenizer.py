"""Tokenizers from GGUF metadata: ids are those of the tokenizer behind the file; a bad file is one sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN_2

from paceline.gguf.gguf_file import GgufError, GgufFile
from paceline.text import Tokenizer, token_texts, vocabulary_fingerprint
from paceline.text.gguf_pre_tokenizers import PRE_TOKENIZERS
from paceline.text.gguf_tokenizer import eos_token_ids
from tests.helpers.vocabularies import TALE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
TEXTS = [
    *("", " ", "a", " a", TALE, "  two  spaces\n\n\n\tand\r\nlines ", "year 2026: 3.1415, ٣½", "I'LL say it's 'S"),
    *("naïve café e\u0301 Über", "東京タワー 你好世界", "👩\u200d👧 🚀", "for i in range(10):\n        return [i]\n"),
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BYTE_SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLITS: Mapping[str, pre_tokenizers.PreTokenizer] = {
    "gpt-2": WORDS,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), WORDS]),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN_2), "isolated"), BYTE_SPLIT]),
}
"""As the models' own tokenizer.json has them."""


def whole_texts() -> Backend:
    """A byte-level vocabulary that was trained without cuts, so that every cut of a text changes its ids."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = BYTE_SPLIT
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [text[start : start + 12] for text in TEXTS for start in range(len(text))] * 2,
        trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False),
    )
    return backend


TRAINED = json.loads(whole_texts().to_str())["model"]
TOKENS = sorted(TRAINED["vocab"], key=TRAINED["vocab"].__getitem__)
MERGES = [tuple(pair) for pair in TRAINED["merges"]]
EXTRA = {"<|endoftext|>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "    ": USER_DEFINED}
FIRST = len(TOKENS)
END_OF_TEXT, TURN, END_OF_TURN, FOUR_SPACES = range(FIRST, FIRST + 4)


def byte_level_metadata(pre: str = "qwen2", extra: Mapping[str, int] = EXTRA, **changed: Any) -> dict[str, Any]:
    """`changed`: keys without `tokenizer.ggml.`; None leaves one out."""
    tokens = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*TOKENS, *extra],
        "token_type": [NORMAL] * len(TOKENS) + list(extra.values()),
        "merges": [" ".join(pair) for pair in MERGES],
        "eos_token_id": END_OF_TURN if "<|im_end|>" in extra else len(TOKENS),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (tokens | changed).items() if value is not None}


def sentencepiece_metadata(**changed: Any) -> dict[str, Any]:
    """Like Llama 2's: control tokens, a token for each byte, then pieces with scores."""
    words = [
        "▁",
        *"abcdehilmnorst",
        "▁t",
        "th",
        "he",
        "▁th",
        "▁the",
        "er",
        "in",
        "▁a",
        "the",
        "▁in",
        "ther",
        "an",
        "▁▁",
    ]
    tokens = {
        "model": "llama",
        "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words],
        "token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words)],
        "scores": [0.0] * 259
        + [-float(len(words) - at) if len(word) > 2 else -float(at) for at, word in enumerate(words)],
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (tokens | changed).items() if value is not None}


def write(folder: Path, metadata: Mapping[str, Any], architecture: str = "llama") -> str:
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add: Any = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return str(path)


def load(folder: Path, metadata: Mapping[str, Any], architecture: str = "llama") -> Tokenizer:
    return Tokenizer.load(write(folder, metadata, architecture))


def ends(folder: Path, metadata: Mapping[str, Any]) -> list[int]:
    return eos_token_ids(GgufFile.open(write(folder, metadata)))


def highest_score_first(text: str, scores: Mapping[str, float]) -> list[str]:
    """Sentencepiece's BPE: join the neighbours that make the token of the highest score, the leftmost first."""
    pieces = list(text)
    while True:
        joined = [
            (scores[left + right], -at) for at, (left, right) in enumerate(pairwise(pieces)) if left + right in scores
        ]
        if not joined:
            return pieces
        at = -max(joined)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@pytest.mark.parametrize("pre", SPLITS)
def test_ids_are_those_of_a_tokenizer_json(tmp_path: Path, pre: str) -> None:
    own = Backend(models.BPE(vocab=TRAINED["vocab"], merges=MERGES))
    own.pre_tokenizer, own.decoder = SPLITS[pre], decoders.ByteLevel()
    own.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False) for token, kind in EXTRA.items()])
    read = load(tmp_path, byte_level_metadata(pre))
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|> ", "a    b     c"]:
        assert read.encode(text) == own.encode(text).ids, text
        assert read.decode(read.encode(text), skip_special_tokens=False) == text
    assert read.fingerprint == Tokenizer(own, {}, None).fingerprint
    assert read.fingerprint == vocabulary_fingerprint(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("names", "text", "cut"),
    [
        ("gpt-2 olmo mpt", "I'LL it's 1234  x\n\n y", ["I", "'", "LL", " it", "'s", " 1234", " ", " x", "\n\n", " y"]),
        ("smollm starcoder refact command-r exaone", "x 123  4", ["x", " ", "1", "2", "3", "  ", "4"]),
        (
            "qwen2 deepseek-r1-qwen",
            "I'LL 12 x_y();\n\n  z",
            ["I", "'LL", " ", "1", "2", " x", "_y", "();\n\n", " ", " z"],
        ),
        ("qwen35", "को 12", ["को", " ", "1", "2"]),
        ("qwen2", "को", ["क", "ो"]),
        ("llama-bpe llama3 dbrx glm4 chatglm-bpe", "I'Ve 12345\n", ["I", "'Ve", " ", "123", "45", "\n"]),
        ("tekken", "getHTTPName 12 a/b//\n", ["get", "HTTPName", " ", "1", "2", " a", "/b", "//\n"]),
        ("gpt-4o llama4", "isIt's 1234", ["is", "It's", " ", "123", "4"]),
        ("default", "a$b 12345", ["a", "$", "b", " ", "123", "45"]),
        ("falcon", "a`b 12345", ["a", "`", "b", " ", "123", "45"]),
        ("deepseek-v3", "1234 .go 漢字かな x", ["123", "4", " .", "go", " ", "漢字かな", " x"]),
        ("deepseek-coder", "x1234 漢字", ["x", "1", "2", "3", "4", " ", "漢字"]),
        ("deepseek-llm", "ab 漢字 12  ", ["ab", " ", "漢字", " ", "12", "  "]),
        ("seed-coder", "x =\n\ny", ["x", " =", "\n\n", "y"]),
        ("bailingmoe", "a\n\nb", ["a", "\n\n", "b"]),
    ],
)
def test_texts_are_cut_as_named(names: str, text: str, cut: Sequence[str]) -> None:
    for name in names.split():
        pieces = PRE_TOKENIZERS[name].build().pre_tokenize_str(text)
        assert [text[start:end] for _, (start, end) in pieces] == cut, name


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("dbrx", False)])
def test_a_word_that_is_a_token_may_stay_whole(tmp_path: Path, pre: str, whole: bool) -> None:
    word = {"qzqz": NORMAL, "<|end_of_text|>": CONTROL}
    read = load(tmp_path, byte_level_metadata(pre, word, eos_token_id=FIRST + 1, add_bos_token=False))
    assert (read.encode("qzqz") == [FIRST]) is whole


@pytest.mark.parametrize("adds_space", [True, False])
def test_sentencepiece_joins_the_highest_score_first(tmp_path: Path, adds_space: bool) -> None:
    metadata = sentencepiece_metadata(add_space_prefix=adds_space)
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    pieces = dict(zip(tokens[259:], scores[259:], strict=True))
    read = load(tmp_path, metadata)
    for text in ["the other lathe", " in  another", "a\n\nthere", "thin ether", "   "]:
        spelled = ("▁" if adds_space else "") + text.replace(" ", "▁")
        expected = [f"<0x{ord(p):02X}>" if p not in pieces else p for p in highest_score_first(spelled, pieces)]
        assert [tokens[id_] for id_ in read.encode(text)] == ["<s>", *expected]
        assert read.decode(read.encode(text)) == text
    assert read.adds_prefix_space is adds_space


def test_sentencepiece_spells_unknown_characters_in_bytes(tmp_path: Path) -> None:
    read = load(tmp_path, sentencepiece_metadata(add_space_prefix=False, add_bos_token=False))
    assert read.encode("é<s>") == [3 + 0xC3, 3 + 0xA9, 1]
    assert read.encode_fragment("<s>") == [3 + ord("<"), 259 + 1 + "abcdehilmnorst".index("s"), 3 + ord(">")]


def test_sentencepiece_without_bytes_has_one_unknown_token_for_unknown_characters(tmp_path: Path) -> None:
    tokens = {
        "tokens": ["<unk>", "<s>", "</s>", "a"],
        "token_type": [UNKNOWN, CONTROL, CONTROL, NORMAL],
        "scores": [0.0] * 4,
    }
    assert load(tmp_path, sentencepiece_metadata(**tokens, add_space_prefix=False)).encode("aéüa") == [1, 3, 0, 3]


def test_special_tokens_are_not_built_from_text(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "<", "s", ">", "<s"]
    types = [UNKNOWN, CONTROL, CONTROL, *[NORMAL] * 4]
    metadata = sentencepiece_metadata(tokens=tokens, token_type=types, scores=[0.0] * 7, add_space_prefix=False)
    read = load(tmp_path, metadata)
    assert read.encode_fragment("<s>") == [6, 5]
    assert read.encode("<s>") == [1, 1]


def test_a_named_end_is_special_whatever_its_type(tmp_path: Path) -> None:
    read = load(tmp_path, byte_level_metadata(extra={"<|im_end|>": USER_DEFINED}, eos_token_id=FIRST))
    assert read.decode(read.encode("a<|im_end|>")) == "a"


def test_user_defined_tokens_are_text(tmp_path: Path) -> None:
    read = load(tmp_path, byte_level_metadata())
    assert read.encode("a     b")[1] == FOUR_SPACES
    assert read.decode(read.encode("a    b<|im_end|>")) == "a    b"
    assert read.special_ids == {END_OF_TEXT, TURN, END_OF_TURN}
    assert read.pieces[FOUR_SPACES] == b"    "


def test_ids_that_fill_up_the_embedding_are_no_tokens(tmp_path: Path) -> None:
    fill = f"[PAD{len(TOKENS) + len(EXTRA)}]"
    read = load(tmp_path, byte_level_metadata(extra={**EXTRA, fill: UNUSED}))
    assert read.token_id(fill) is None
    assert len(read.pieces) == len(TOKENS) + len(EXTRA)
    assert read.fingerprint == load(tmp_path, byte_level_metadata()).fingerprint


@pytest.mark.parametrize(
    ("pre", "said", "begins"),
    [("qwen2", None, False), ("qwen2", True, True), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_a_begin_token_is_added_as_the_file_says_or_as_its_kind_does(
    tmp_path: Path, pre: str, said: bool | None, begins: bool
) -> None:
    read = load(tmp_path, byte_level_metadata(pre, bos_token_id=END_OF_TEXT, add_bos_token=said, add_eos_token=True))
    bare = read.encode("text", add_special_tokens=False)
    assert read.encode("text") == [*[END_OF_TEXT] * begins, *bare, END_OF_TURN]
    assert read.prefix_tokens == [END_OF_TEXT] * begins


def test_spaces_after_phi_3s_special_tokens_are_dropped(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(add_bos_token=False, add_space_prefix=False)
    for architecture, dropped in (("phi3", True), ("llama", False)):
        read = load(tmp_path, metadata, architecture)
        assert (read.encode("</s>  a") == read.encode("</s>a")) is dropped
        assert read.encode("<s>  a") != read.encode("<s>a")


@pytest.mark.parametrize(
    "metadata", [byte_level_metadata(extra={**EXTRA, "[PAD999]": UNUSED}), sentencepiece_metadata()]
)
def test_texts_of_tokens_are_those_of_the_tokenizer(tmp_path: Path, metadata: Mapping[str, Any]) -> None:
    """A byte-level file says them itself."""
    read = load(tmp_path, metadata)
    assert token_texts(write(tmp_path, metadata)) == (read.pieces, read.special_ids)


def test_roles_and_the_template_come_from_the_file(tmp_path: Path) -> None:
    ids: dict[str, Any] = {"bos_token_id": END_OF_TEXT, "padding_token_id": END_OF_TEXT, "unknown_token_id": 0}
    read = load(tmp_path, byte_level_metadata(**ids) | {"tokenizer.chat_template": CHATML})
    roles = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert read.special_tokens == roles  # token 0 is text, and no special token
    assert read.chat_template is not None
    prompt = read.chat_template.render([{"role": "user", "content": "hi"}])
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert load(tmp_path, byte_level_metadata()).chat_template is None


@pytest.mark.parametrize(
    ("extra", "keys", "template", "expected"),
    [
        (EXTRA, {}, None, [END_OF_TEXT, END_OF_TURN]),
        ({"<stop>": CONTROL, "</s>": NORMAL, "<|eot_id|>": USER_DEFINED}, {}, None, [FIRST, FIRST + 2]),
        ({"<a>": CONTROL, "<b>": CONTROL, "<c>": CONTROL}, {"eot_token_id": FIRST + 2}, None, [FIRST, FIRST + 2]),
        ({"<a>": CONTROL, "<b>": CONTROL, "<c>": CONTROL}, {"eom_token_id": FIRST + 1}, None, [FIRST, FIRST + 1]),
        ({"<a>": CONTROL, "<stop>": CONTROL, "<stop>2": CONTROL}, {}, "<stop>2\n", [FIRST, FIRST + 2]),
        ({"<a>": CONTROL, "<stop>": CONTROL}, {}, "<stop>answer<stop>", [FIRST]),
        ({"<a>": CONTROL, "<stop>": CONTROL}, {}, "{% broken", [FIRST]),
        ({"<|return|>": CONTROL, "<|call|>": CONTROL, "<|end|>": CONTROL}, {}, "<|end|>", [FIRST, FIRST + 1]),
        ({"<a>": CONTROL, "<|end|>": CONTROL}, {}, None, [FIRST, FIRST + 1]),
    ],
)
def test_every_end_of_a_turn_is_found(
    tmp_path: Path, extra: Mapping[str, int], keys: Mapping[str, Any], template: str | None, expected: list[int]
) -> None:
    metadata = byte_level_metadata(extra=extra, **keys)
    if template is not None:
        shown = "{% for message in messages %}{{ message.content }} " + template + "{% endfor %}"
        metadata["tokenizer.chat_template"] = shown
    assert ends(tmp_path, metadata) == expected


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": None}, "no tokenizer.ggml.model"),
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"model": "t5"}, "tokenizer.ggml.model is 't5'"),
        ({"pre": None}, "no tokenizer.ggml.pre"),
        ({"pre": "klingon"}, "tokenizer.ggml.pre is 'klingon'"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokens": ["a", "a"], "token_type": [1, 1], "eos_token_id": 1}, "tokenizer.ggml.tokens holds 'a' twice"),
        ({"token_type": None}, "no tokenizer.ggml.token_type"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 entries"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"merges": ["qq zz"]}, "tokenizer.ggml.merges does not fit"),
        ({"merges": ["alone"]}, "tokenizer.ggml.merges does not fit"),
        ({"bos_token_id": 99999}, "tokenizer.ggml.bos_token_id is 99999"),
        ({"eos_token_id": "2"}, "tokenizer.ggml.eos_token_id is '2'"),
        ({"add_bos_token": True}, "no tokenizer.ggml.bos_token_id"),
    ],
)
def test_a_bad_byte_level_file_is_one_sentence(tmp_path: Path, changed: Mapping[str, Any], message: str) -> None:
    with pytest.raises(GgufError, match=message):
        load(tmp_path, byte_level_metadata(**changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"scores": None}, "no tokenizer.ggml.scores"),
        ({"scores": [1.0]}, "tokenizer.ggml.scores has 1 entries"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type has 1 entries"),
    ],
)
def test_a_bad_sentencepiece_file_is_one_sentence(tmp_path: Path, changed: Mapping[str, Any], message: str) -> None:
    with pytest.raises(GgufError, match=message):
        load(tmp_path, sentencepiece_metadata(**changed))
