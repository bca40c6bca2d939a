"""Drafting in another vocabulary and retokenizing: the text of requests and drafts in both vocabularies."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import EngineConfig, SamplingParams
from paceline.core.tree import TokenTree
from paceline.drafting.methods.draft_model import DraftModelSpeculator
from paceline.drafting.speculator import Commit, DraftError, Limit, Opening, Speculator
from paceline.drafting.vocabulary.draft_transcript import LONGEST_TAIL, DraftTranscript
from paceline.drafting.vocabulary.retokenized_draft import RetokenizedDraft
from paceline.drafting.vocabulary.stable_tokens import StableTokens
from paceline.drafting.vocabulary.vocabulary_mapping import Vocabulary, VocabularyMapping
from paceline.model.loading import build
from paceline.model.rows import Row
from paceline.text import Tokenizer
from tests.helpers.llamas import VOCABULARY, peaked_llama
from tests.helpers.seen import nodes_of, root_of
from tests.helpers.vocabularies import (
    TALE,
    Reciter,
    accepted,
    byte_level,
    grow,
    longest,
    metaspace,
    numbered,
    vocabulary,
)
from tests.helpers.vocabularies import permuted_llama as permuted
from tests.unit.test_draft_model import PROMPT, committed, decoded

GREEDY = SamplingParams(temperature=0.0)
HOT = SamplingParams(temperature=0.8, seed=5)
BYTES, SPACES = vocabulary(byte_level()), vocabulary(metaspace())
LETTERS = vocabulary(byte_level(size=270))
"""Few tokens beyond single bytes."""
PAIRS = [(BYTES, SPACES), (SPACES, BYTES), (BYTES, LETTERS), (LETTERS, BYTES)]
NAMES = ["to_spaces", "to_bytes", "to_letters", "of_letters"]


def drafting(
    target: Vocabulary, draft: Vocabulary, slots: int = 2048, width: int = 2
) -> tuple[RetokenizedDraft, Reciter]:
    model = Reciter(draft, slots=slots)
    inner = DraftModelSpeculator(model, width, least_path_probability=0.02)
    return RetokenizedDraft(inner, VocabularyMapping.between(target, draft)), model


class TestAcceptance:
    @pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "sampled"])
    @pytest.mark.parametrize(("target", "draft"), PAIRS, ids=NAMES)
    def test_a_draft_that_knows_the_text_is_mostly_accepted(
        self, target: Vocabulary, draft: Vocabulary, params: SamplingParams
    ) -> None:
        """However the tokenizers split words and characters. At most four of five tokens can be accepted; by chance one
        of a hundred would be."""
        prompt = target.tokenizer.encode(TALE[:30])
        output = decoded(Reciter(target, sure=7.0), prompt, params, 100)
        right, _ = accepted(drafting(target, draft)[0], prompt, output, params)
        assert right > 55

    def test_the_same_network_with_its_vocabulary_permuted_is_as_good_as_the_target_itself(self) -> None:
        """Each token is a number, so a text has one encoding."""
        numbers = random.Random(3).sample(range(VOCABULARY), VOCABULARY)
        own, other = (build(net, "", EngineConfig(slots=512), "", []) for net in (peaked_llama(), permuted(numbers)))
        mapping = VocabularyMapping.between(numbered(range(VOCABULARY)), numbered(numbers))
        output = decoded(own, PROMPT, GREEDY, 40)
        inner = DraftModelSpeculator(other, 1, least_path_probability=0.0)
        assert accepted(RetokenizedDraft(inner, mapping), PROMPT, output, GREEDY) == (32, 8)

    def test_an_end_of_text_is_guessed(self) -> None:
        """The draft's end of text becomes the target's; nothing after it is drafted."""

        class Ending(Reciter):
            def _next(self, row: Row) -> int:
                return 300 if row.token == 2 else 2

        mapping = VocabularyMapping.between(BYTES, SPACES)
        end = BYTES.tokenizer.token_id("<|end|>")
        tree = opened(
            RetokenizedDraft(DraftModelSpeculator(Ending(SPACES), 1), mapping), BYTES.tokenizer.encode("the winter")
        )
        assert list(root_of(tree).children) == [end]
        assert list(root_of(tree).children[0].children) == [], "nothing comes after it"


class TestTree:
    def test_guesses_are_as_likely_as_the_draft_says(self) -> None:
        """The log-probabilities of a path are the draft's."""
        numbers = random.Random(3).sample(range(VOCABULARY), VOCABULARY)
        own, other = (build(net, "", EngineConfig(slots=512), "", []) for net in (peaked_llama(), permuted(numbers)))
        mapping = VocabularyMapping.between(numbered(range(VOCABULARY)), numbered(numbers))
        mapped = opened(RetokenizedDraft(DraftModelSpeculator(other, 2, least_path_probability=0.01), mapping), PROMPT)
        itself = opened(DraftModelSpeculator(own, 2, least_path_probability=0.01), PROMPT)
        assert paths(mapped) == paths(itself)
        for path in paths(itself):
            log_prob = mapped.log_prob(mapped.match(path)[-1])
            assert log_prob == pytest.approx(itself.log_prob(itself.match(path)[-1]), abs=1e-4)

    def test_half_a_character_is_completed_and_nothing_else_is_guessed(self) -> None:
        """The draft's path has the whole character; its probability is that of the rest."""
        at = TALE.index("京")
        tokens = [*LETTERS.tokenizer.encode(TALE[:at]), *LETTERS.tokenizer.encode_fragment("京")[:2]]
        draft, _ = drafting(LETTERS, SPACES, width=3)
        tree = opened(draft, tokens)
        [last] = LETTERS.tokenizer.encode_fragment("京")[2:]
        assert [text_of(LETTERS.tokenizer, [token]) for token in root_of(tree).children] == ["京".encode()[2:]]
        known = [node for node in nodes_of(draft._draft.tree(1)) if len(node.path()) == 3]
        assert root_of(tree).children[last].log_prob == pytest.approx(max(node.path_log_prob for node in known))

    def test_a_guess_that_contradicts_the_half_that_is_there_is_none(self) -> None:
        """Although the target's half and the draft's other half would be a character."""
        mapping = VocabularyMapping.between(LETTERS, SPACES)
        tokens = [*LETTERS.tokenizer.encode("東東"), *LETTERS.tokenizer.encode_fragment("京")[:2]]
        draft = RetokenizedDraft(DraftModelSpeculator(Reciter(SPACES, "東" * 9), 1), mapping)
        assert opened(draft, tokens).size == 0
        assert draft._draft.tree(1).size > 0

    @pytest.mark.parametrize("drafts", [[0], [3 + 0xE4, 2]], ids=["unknown", "half a character"])
    def test_a_special_token_that_is_no_end_of_a_text_is_not_drafted(self, drafts: list[int]) -> None:
        class Stuttering(Reciter):
            def _next(self, row: Row) -> int:
                return drafts[-1] if row.token == drafts[0] else drafts[0]

        mapping = VocabularyMapping.between(BYTES, SPACES)
        tree = opened(
            RetokenizedDraft(DraftModelSpeculator(Stuttering(SPACES), 1), mapping), BYTES.tokenizer.encode("the winter")
        )
        ends = {BYTES.tokenizer.token_id("<|end|>"), -1}
        assert not ends.intersection(node.token for node in nodes_of(tree))

    def test_what_was_guessed_is_read_again_when_the_target_writes_it_otherwise(self) -> None:
        """Letter by letter, while the draft adds no nodes."""
        draft, _ = drafting(BYTES, LETTERS)
        tree = opened(draft, BYTES.tokenizer.encode("the"))
        letters = [BYTES.tokenizer.pieces.index(bytes([byte])) for byte in b" tra"]
        assert longest(tree, letters) == []
        draft._draft.limit(Limit(1, 9, 0))
        draft.commit(Commit(1, tree.position, letters, 0))
        tree.commit(letters)
        grow(draft, tree)
        assert longest(tree, BYTES.tokenizer.encode_fragment(" traveller")[1:]) != []

    def test_a_token_that_the_target_has_no_number_for_is_not_guessed(self) -> None:
        small = Vocabulary("small", BYTES.tokenizer, 300)
        prompt = [token for token in BYTES.tokenizer.encode(TALE[:40]) if token < 300]
        tree = opened(drafting(small, LETTERS)[0], prompt)
        assert tree.size > 0
        assert max(node.token for node in nodes_of(tree)) < 300

    @pytest.mark.parametrize(("depth", "nodes"), [(1, 1), (1, 50), (3, 4), (4, 50)])
    def test_it_has_what_is_wanted_and_no_more(self, depth: int, nodes: int) -> None:
        prompt = BYTES.tokenizer.encode(TALE[:30])
        tree = opened(drafting(BYTES, SPACES)[0], prompt, depth=depth, nodes=nodes)
        assert max(len(node.path()) for node in nodes_of(tree)) == min(depth, nodes)
        assert tree.size <= nodes

    def test_a_paused_request_follows_and_goes_on_when_it_may(self) -> None:
        draft, prompt = drafting(BYTES, SPACES)[0], BYTES.tokenizer.encode(TALE[:30])
        tree = opened(draft, prompt, depth=4, nodes=0)
        assert tree.size == 0
        new = BYTES.tokenizer.encode_fragment(TALE[30:46])
        draft.commit(Commit(1, tree.position, new[:-1], 0))
        tree.commit(new[:-1])
        grow(draft, tree)
        assert tree.size == 0
        draft.limit(Limit(1, 4, 50))
        draft.commit(Commit(1, tree.position, new[-1:], 0))
        tree.commit(new[-1:])
        grow(draft, tree)
        assert len(longest(tree, BYTES.tokenizer.encode_fragment(TALE[46:80]))) >= 3

    def test_likely_guesses_are_likely_in_the_tree(self) -> None:
        """No path is likelier than its beginning."""
        tree = opened(drafting(BYTES, LETTERS)[0], BYTES.tokenizer.encode(TALE[:30]))
        path = longest(tree, BYTES.tokenizer.encode_fragment(TALE[30:60]))
        assert len(path) >= 3
        assert tree.path_log_probs[tree.match(path)[-1]] > -0.5
        assert all(node.log_prob <= 0 for node in nodes_of(tree))

    @pytest.mark.parametrize(("target", "draft"), PAIRS, ids=NAMES)
    def test_guesses_after_any_commits_are_those_of_a_fresh_start(self, target: Vocabulary, draft: Vocabulary) -> None:
        """After any rewinds nothing is stale, and the draft computes only new tokens."""
        rng = random.Random(1)
        drafted, _ = drafting(target, draft)
        tokens = target.tokenizer.encode(TALE[:12])
        tree = opened(drafted, tokens, rounds=2)
        for _ in range(25):
            path = committed(tree, rng)
            new = [token if token < target.size else 5 for token in path]
            drafted.commit(Commit(1, tree.position, new, 0))
            tree.commit(new)
            tokens = [*tokens, *new]
            drafted.check_integrity()
            for growth in drafted.grow().values():
                tree.graft(growth, 1000)
        grow(drafted, tree)
        fresh = opened(drafting(target, draft)[0], tokens)
        assert paths(fresh) <= paths(tree)

    def test_what_was_computed_stays(self) -> None:
        """A commit costs the tokens that it changed, not the prompt."""
        draft, model = drafting(SPACES, LETTERS)
        prompt = SPACES.tokenizer.encode(TALE)
        tree = opened(draft, prompt)
        for size in range(1, 12):
            del model.ran[:]
            new = SPACES.tokenizer.encode_fragment("and odd"[:size])[-1:]
            draft.commit(Commit(1, tree.position, new, 0))
            tree.commit(new)
            draft.grow()
            assert len(model.ran) < 40
        assert len(prompt) > 150


class TestTranscript:
    @pytest.mark.parametrize(("target", "draft"), PAIRS, ids=NAMES)
    @settings(deadline=None)
    @given(data=st.data())
    def test_it_is_the_text_in_the_drafts_tokens(
        self, target: Vocabulary, draft: Vocabulary, data: st.DataObject
    ) -> None:
        """A short text has the draft tokenizer's own encoding, whatever the target's tokens are."""
        text = data.draw(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60))
        tokens = target.tokenizer.encode(text)
        cut = data.draw(st.integers(1, len(tokens)))
        transcript = DraftTranscript(VocabularyMapping.between(target, draft), tokens[:cut])
        for token in tokens[cut:]:
            transcript.extend([token])
        assert transcript.pending == b""
        assert transcript.tokens == draft.tokenizer.encode(text)

    def test_a_long_text_is_settled_and_its_end_is_not(self) -> None:
        mapping = VocabularyMapping.between(BYTES, SPACES)
        transcript = DraftTranscript(mapping, BYTES.tokenizer.encode("the"))
        for token in BYTES.tokenizer.encode(TALE * 5):
            before = transcript.tokens
            transcript.extend([token])
            settled = max(0, len(before) - LONGEST_TAIL)
            assert transcript.tokens[:settled] == before[:settled]
        assert text_of(SPACES.tokenizer, transcript.tokens) == (" the" + TALE * 5).encode()
        once = DraftTranscript(mapping, BYTES.tokenizer.encode("the" + TALE * 5))
        assert text_of(SPACES.tokenizer, once.tokens) == text_of(SPACES.tokenizer, transcript.tokens)

    def test_the_tail_begins_with_a_space(self) -> None:
        transcript = DraftTranscript(VocabularyMapping.between(BYTES, LETTERS), BYTES.tokenizer.encode("word   " * 100))
        assert transcript._tail.startswith("   word")

    def test_a_text_without_spaces_is_settled_too(self) -> None:
        transcript = DraftTranscript(VocabularyMapping.between(BYTES, SPACES), BYTES.tokenizer.encode("x" * 2000))
        assert len(transcript._tail) <= LONGEST_TAIL
        assert text_of(SPACES.tokenizer, transcript.tokens) == b" " + b"x" * 2000

    def test_half_a_character_waits_for_the_other_half(self) -> None:
        transcript = DraftTranscript(VocabularyMapping.between(LETTERS, BYTES), LETTERS.tokenizer.encode("a"))
        for byte in LETTERS.tokenizer.encode_fragment("東")[:2]:
            transcript.extend([byte])
        assert transcript.pending == "東".encode()[:2]
        assert transcript.window == b"a" + "東".encode()[:2]
        assert text_of(BYTES.tokenizer, transcript.tokens) == b"a"
        transcript.extend(LETTERS.tokenizer.encode_fragment("東")[2:])
        assert text_of(BYTES.tokenizer, transcript.tokens) == "a東".encode()

    def test_what_never_becomes_a_character_is_replaced(self) -> None:
        first = LETTERS.tokenizer.encode_fragment("東")[:1]
        mapping = VocabularyMapping.between(LETTERS, BYTES)
        transcript = DraftTranscript(mapping, [*first, *LETTERS.tokenizer.encode("a")])
        assert text_of(BYTES.tokenizer, transcript.tokens) == "\ufffda".encode()
        special = LETTERS.tokenizer.token_id("<|turn|>")
        assert special is not None
        transcript.extend([*first, special, *LETTERS.tokenizer.encode("b")])
        ends = BYTES.tokenizer.encode_fragment("\ufffda\ufffd"), BYTES.tokenizer.encode_fragment("b")
        assert transcript.tokens == [*ends[0], *mapping.draft_ids[special], *ends[1]]
        assert transcript.window == b"b"
        assert transcript.pending == b""

    def test_a_prompt_of_which_nothing_is_left_is_something_all_the_same(self) -> None:
        assert DraftTranscript(VocabularyMapping.between(SPACES, BYTES), [1]).tokens


class TestStableTokens:
    @pytest.mark.parametrize("tokenizer", [BYTES.tokenizer, SPACES.tokenizer, LETTERS.tokenizer])
    @settings(deadline=None)
    @given(data=st.data())
    def test_they_begin_the_text(self, tokenizer: Tokenizer, data: st.DataObject) -> None:
        """Each token has its end; if the text is final, the tokens cover it."""
        text = data.draw(st.one_of(st.text(min_size=1, max_size=20), st.just(TALE[:50]))).encode()
        at = data.draw(st.integers(0, len(text)))
        tokens = StableTokens(tokenizer).of(text[at:], text[:at], final=data.draw(st.booleans()))
        lengths = [length for _, length in tokens]
        for count, length in enumerate(lengths, 1):
            assert text_of(tokenizer, [token for token, _ in tokens[:count]]) == text[at : at + length]
        final = StableTokens(tokenizer).of(text[at:], text[:at], final=True)
        assert not final or final[-1][1] == len(text) - at
        assert final or at == len(text) or not whole(text[:at])

    def test_what_more_text_could_change_is_left_out(self) -> None:
        stable = StableTokens(BYTES.tokenizer)
        whole = BYTES.tokenizer.encode_fragment(" the traveller")
        assert text_of(BYTES.tokenizer, whole[:2]) == b" the tra"
        assert [token for token, _ in stable.of(b" the traveller", b"")] == whole[:2]
        assert text_of(BYTES.tokenizer, [token for token, _ in stable.of(b" th", b"")]) == b" t"
        assert stable.of(b" t", b"") == []
        last = whole[-1]
        assert [token for token, _ in stable.of(b" the traveller", b"", last)] == whole, "but what a draft has, too"
        assert [token for token, _ in stable.of(b" the traveller sa", b"", last)][:3] == whole, "and what is followed"

    def test_text_before_it_counts(self) -> None:
        """The encoding of `ller` after `trave` depends on the tokens of `trave`."""
        stable = StableTokens(BYTES.tokenizer)
        assert stable.of(b"veller said he", b" tra")[0] == (BYTES.tokenizer.encode_fragment(" traveller")[1], 6)
        assert text_of(BYTES.tokenizer, [t for t, _ in stable.of(b"eller said he", b" trav")]).startswith(b"eller said")

    def test_a_character_is_completed_only_where_the_text_before_allows_it(self) -> None:
        stable, [*_, last] = StableTokens(LETTERS.tokenizer), LETTERS.tokenizer.encode_fragment("東")
        rest = "東".encode()[2:]
        assert stable.of(rest, "a東".encode()[:3], final=True) == [(last, 1)]
        assert stable.of(rest, b"\xff" + "東".encode()[:2], final=True) == []

    def test_a_tokenizer_that_changes_what_it_is_given_proposes_nothing(self) -> None:
        """It proposes tokens only where it keeps the text."""
        from tokenizers import normalizers

        backend = byte_level()._backend
        backend.normalizer = normalizers.Lowercase()
        stable = StableTokens(Tokenizer(backend, {}, None))
        assert stable.of(b" The traveller", b"") == []
        assert stable.of(b" the traveller", b"THE")


class TestErrors:
    def test_a_request_without_slots_is_dropped(self) -> None:
        """When slots run out; closing the request frees its slots."""
        draft = drafting(BYTES, LETTERS, slots=20)[0]
        with pytest.raises(DraftError, match="out of slots"):
            draft.open(Opening(1, BYTES.tokenizer.encode(TALE), 0, GREEDY, 4, 50))
        opened(draft, BYTES.tokenizer.encode("the"))
        with pytest.raises(DraftError, match="out of slots"):
            draft.commit(Commit(1, 0, BYTES.tokenizer.encode(" traveller" * 5), 0))
        draft.close(1)
        draft.check_integrity()
        assert draft.grow() == {}

    def test_it_passes_for_a_draft_of_the_targets_vocabulary(self) -> None:
        draft = drafting(BYTES, SPACES)[0]
        assert draft.vocabulary_fingerprint == BYTES.tokenizer.fingerprint
        assert draft.vocabulary_size == BYTES.size


def opened(
    draft: Speculator, tokens: Sequence[int], *, depth: int = 4, nodes: int = 100, rounds: int | None = None
) -> TokenTree:
    """The tree after so many rounds, or when it is complete."""
    draft.open(Opening(1, tokens, 0, GREEDY, depth, nodes))
    tree = TokenTree(len(tokens) - 1, tokens[-1])
    for _ in range(rounds or 0):
        for growth in draft.grow().values():
            tree.graft(growth, 1000)
    if rounds is None:
        grow(draft, tree)
    return tree


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(n.token for n in node.path()) for node in nodes_of(tree)}


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> bytes:
    return b"".join(tokenizer.piece(token) for token in tokens if token not in tokenizer.special_ids)


def whole(text: bytes) -> bool:
    return text.decode(errors="ignore").encode() == text
