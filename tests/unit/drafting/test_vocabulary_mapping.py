"""Common tokens of two vocabularies, and translation between them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from paceline.drafting.vocabulary.vocabulary_mapping import MIN_COMMON_TOKENS, Vocabulary, VocabularyMapping
from paceline.model_names import ModelNotFoundError
from paceline.text import Tokenizer
from paceline_lab.fake_models.table_model import TableModel
from tests.helpers.drafts import intersection_draft
from tests.helpers.vocabularies import byte_level, metaspace, numbered, text_of, vocabulary

BYTES, SPACES = vocabulary(byte_level()), vocabulary(metaspace())
TO_SPACES = VocabularyMapping.between(target=BYTES, draft=SPACES)
TO_BYTES = VocabularyMapping.between(target=SPACES, draft=BYTES)


def spelled(tokens: dict[str, int], **special: str) -> Vocabulary:
    """A byte-level vocabulary of these tokens, without merges."""
    backend = Backend(models.BPE(vocab=tokens, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in special.values()])
    return vocabulary(Tokenizer(backend, special, None))


def token(of: Vocabulary, spelling: str) -> int:
    id_ = of.tokenizer.token_id(spelling)
    assert id_ is not None
    return id_


MAPPINGS = pytest.mark.parametrize("mapping", [TO_SPACES, TO_BYTES], ids=["to_spaces", "to_bytes"])
TOKENIZERS = pytest.mark.parametrize("tokenizer", [BYTES.tokenizer, SPACES.tokenizer], ids=["byte_level", "metaspace"])


class TestMeanings:
    @pytest.mark.parametrize(("ours", "theirs"), [("Ġthe", "▁the"), ("Ġ", "▁"), ("Ã", "<0xC3>"), ("e", "e")])
    def test_tokens_that_add_the_same_bytes_are_the_same(self, ours: str, theirs: str) -> None:
        ours_id, theirs_id = token(BYTES, ours), token(SPACES, theirs)
        assert TO_SPACES.target_ids[theirs_id] == ours_id
        assert TO_SPACES.draft_ids[ours_id] == (theirs_id,)

    def test_of_tokens_with_one_meaning_the_first_is_used(self) -> None:
        """A letter and its byte token: the byte token comes first in the vocabulary, and text uses the letter."""
        letter, byte = token(SPACES, "e"), token(SPACES, "<0x65>")
        assert byte < letter
        assert TO_SPACES.target_ids[byte] == -1
        assert TO_BYTES.draft_ids[byte] == TO_BYTES.draft_ids[letter] == (token(BYTES, "e"),)
        assert TO_BYTES.target_ids[token(BYTES, "e")] == letter

    @MAPPINGS
    def test_both_directions_agree(self, mapping: VocabularyMapping) -> None:
        shared = [mapping.target_ids[id_] for id_ in mapping.common]
        assert len(set(shared)) == len(shared) > 250
        for mine, its in zip(mapping.common, shared, strict=True):
            assert mapping.draft_ids[its] == (mine,)
            if its not in mapping.target.tokenizer.special_ids:
                assert mapping.target.tokenizer.piece(its) == mapping.draft.tokenizer.piece(mine)

    def test_special_tokens_are_the_same_by_spelling_or_by_what_they_end(self) -> None:
        target = spelled({"a": 0, "<s>": 1}, eos_token="<end>", pad_token="<pad>")
        draft = spelled({"a": 0, "<pad>": 1}, eos_token="</s>", unk_token="<end>", other_token="<s>")
        mapping = VocabularyMapping.between(target, draft)
        assert mapping.target_ids[token(draft, "<end>")] == token(target, "<end>"), "spelling counts before the role"
        assert mapping.target_ids[token(draft, "</s>")] == -1
        assert mapping.target_ids[token(draft, "<s>")] == -1, "that one is text"
        assert TO_SPACES.target_ids[token(SPACES, "</s>")] == token(BYTES, "<|end|>")

    def test_ids_that_a_tokenizer_or_a_model_lacks_mean_nothing(self) -> None:
        padded = VocabularyMapping.between(vocabulary(BYTES.tokenizer, more=3), vocabulary(SPACES.tokenizer, more=5))
        assert padded.target_ids[-5:] == [-1] * 5
        assert padded.draft_ids[-3:] == [(token(SPACES, "<unk>"),)] * 3
        cut = VocabularyMapping.between(Vocabulary("cut", BYTES.tokenizer, 300), SPACES)
        assert len(cut.draft_ids) == 300
        assert max(cut.target_ids) < 300
        small = VocabularyMapping.between(BYTES, Vocabulary("cut", SPACES.tokenizer, 270))
        assert max(max(ids) for ids in small.draft_ids) < 270

    def test_numbers_are_matched_by_what_they_read_like(self) -> None:
        mapping = VocabularyMapping.between(numbered([5, 6, 7, 8]), numbered([8, 9, 5]))
        assert mapping.target_ids == [3, -1, 0]
        assert mapping.draft_ids == [(2,), (0,), (0,), (0,)], "6 and 7 are unknown, which reads as 8"

    def test_a_vocabulary_is_the_same_as_itself(self) -> None:
        again = VocabularyMapping.between(BYTES, BYTES)
        assert again.identical
        assert not TO_SPACES.identical
        assert again.target_ids == list(range(BYTES.size))


class TestTranslation:
    @MAPPINGS
    def test_every_token_is_written_with_its_own_bytes(self, mapping: VocabularyMapping) -> None:
        """Also parts of characters; only special tokens are not text."""
        target, draft = mapping.target.tokenizer, mapping.draft.tokenizer
        for id_ in range(mapping.target.size):
            assert mapping.draft_ids[id_]
            if id_ not in target.special_ids:
                assert b"".join(map(draft.piece, mapping.draft_ids[id_])) == target.piece(id_)

    def test_a_special_token_that_the_draft_lacks_is_spelled_out(self) -> None:
        assert text_of(SPACES.tokenizer, TO_SPACES.draft_ids[token(BYTES, "<|turn|>")]) == b"<|turn|>"

    @settings(deadline=None)
    @given(st.text())
    def test_any_text_reads_the_same(self, text: str) -> None:
        written = TO_SPACES.to_draft_tokens(BYTES.tokenizer.encode(text))
        assert b"".join(map(SPACES.tokenizer.piece, written)) == text.encode()

    def test_a_prompt_begins_as_its_model_expects(self) -> None:
        to_spaces = TO_SPACES.prompt_to_draft_tokens(BYTES.tokenizer.encode("the"))
        assert to_spaces[:1] == SPACES.tokenizer.prefix_tokens == [1]
        assert TO_BYTES.prompt_to_draft_tokens(SPACES.tokenizer.encode("the")) == BYTES.tokenizer.encode(" the")
        assert TO_BYTES.prompt_to_draft_tokens([1]), "never nothing"


class TestRefusals:
    def test_too_little_in_common(self) -> None:
        model = TableModel(50, 512, 64)
        for count in (MIN_COMMON_TOKENS, MIN_COMMON_TOKENS - 1):
            mapping = VocabularyMapping.between(numbered(range(50), "big"), numbered(range(50 - count, 90), "small"))
            assert len(mapping.common) == count
            if count == MIN_COMMON_TOKENS:
                intersection_draft(model, mapping, 3)
        with pytest.raises(ValueError, match=f"of big and its draft small have only {count} tokens in common: choose"):
            intersection_draft(model, mapping, 3)

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ('{"vocab_size": 9}', r"has no tokenizer\.json: save"),
            ("{}", "has no vocab_size"),
            ("[1]", "no JSON object"),
            ("{", "cannot be read"),
        ],
    )
    def test_a_folder_that_says_too_little(self, tmp_path: Path, config: str, message: str) -> None:
        (tmp_path / "config.json").write_text(config)
        if "tokenizer" not in message:
            BYTES.tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(ModelNotFoundError, match=message):
            Vocabulary.load(str(tmp_path))

    def test_sizes_are_the_models(self, tmp_path: Path) -> None:
        BYTES.tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
        for config in ({"vocab_size": 500}, {"text_config": {"vocab_size": 500}}):
            (tmp_path / "config.json").write_text(json.dumps(config))
            assert Vocabulary.load(str(tmp_path)).size == 500
        assert Vocabulary.load("table:64").size == 64


class TestInsideAText:
    @TOKENIZERS
    def test_special_tokens_are_text_there(self, tokenizer: Tokenizer) -> None:
        for spelling in ("<|end|>", "</s>"):
            assert text_of(tokenizer, tokenizer.encode_fragment(spelling)) == spelling.encode()

    @pytest.mark.parametrize(
        ("pre_tokenizer", "decoder"),
        [
            (pre_tokenizers.Metaspace(prepend_scheme="always"), decoders.Metaspace()),
            (pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace()),
            (pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()),
            (
                pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=True)]),
                decoders.ByteLevel(),
            ),
        ],
        ids=["always", "first", "byte_level", "sequence"],
    )
    def test_the_space_before_a_text(
        self, pre_tokenizer: pre_tokenizers.PreTokenizer, decoder: decoders.Decoder
    ) -> None:
        backend = Backend(models.BPE(vocab={token: id_ for id_, token in enumerate("abc▁Ġ")}, merges=[]))
        backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoder
        tokenizer = Tokenizer(backend, {}, None)
        assert tokenizer.adds_prefix_space
        assert text_of(tokenizer, tokenizer.encode("ab c")) == b" ab c"
        assert text_of(tokenizer, tokenizer.encode_fragment("ab c")) == b"ab c"
