"""Drafting in another vocabulary: among the common tokens, or by retokenizing the text that the draft writes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from paceline.config import EngineConfig, SamplingParams
from paceline.core.logits_rules import History, SamplingRow
from paceline.core.sampling import scores
from paceline.drafting.retokenizing_speculator import RetokenizingSpeculator
from paceline.drafting.speculator import DraftError, Limit
from paceline.drafting.vocabulary.draft_transcript import LONGEST_TAIL, DraftTranscript
from paceline.drafting.vocabulary.stable_tokens import StableTokens
from paceline.drafting.vocabulary.vocabulary_mapping import Vocabulary, VocabularyMapping
from paceline.model import Model, SlotTable
from paceline.model.loading import build
from paceline.model.rows import Row
from paceline.text import Tokenizer
from paceline_lab.fake_models.table_model import TableModel
from tests.helpers.drafts import intersection_draft, model_draft
from tests.helpers.llamas import LAWS, VOCABULARY, peaked_llama
from tests.helpers.vocabularies import (
    TALE,
    Reciter,
    byte_level,
    metaspace,
    numbered,
    permuted_llama,
    text_of,
    vocabulary,
)
from tests.unit.drafting.drafted import GREEDY, DraftedRequest, accepted, decoded, drawn_tokens, finished

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
HOT = SamplingParams(temperature=0.8, seed=5)
NUMBERS = random.Random(3).sample(range(VOCABULARY), VOCABULARY)
TARGET = numbered(range(VOCABULARY))
PERMUTED = VocabularyMapping.between(TARGET, numbered(NUMBERS))
STRANGERS = {3: (3, 7), 9: (61,), 20: (5, 5, 5)}
"""The draft's tokens for target tokens that it lacks."""
PARTIAL = VocabularyMapping(
    TARGET,
    numbered(range(VOCABULARY)),
    [-1 if id_ in STRANGERS else id_ for id_ in range(VOCABULARY)],
    [STRANGERS.get(id_, (id_,)) for id_ in range(VOCABULARY)],
)
BYTES, SPACES = vocabulary(byte_level()), vocabulary(metaspace())
LETTERS = vocabulary(byte_level(size=270))
"""Few tokens beyond single bytes."""
PAIRS = pytest.mark.parametrize(
    ("target", "draft"),
    [(BYTES, SPACES), (SPACES, BYTES), (BYTES, LETTERS), (LETTERS, BYTES)],
    ids=["to_spaces", "to_bytes", "to_letters", "of_letters"],
)
TOKENIZERS = pytest.mark.parametrize("tokenizer", [each.tokenizer for each in (BYTES, SPACES, LETTERS)])


def llama(*, permuted: bool = False) -> Model:
    network = permuted_llama(NUMBERS) if permuted else peaked_llama()
    return build(network, "llama", EngineConfig(slots=1024), "", [])


class Retokenizing:
    """A draft that knows the tale, what it drafts in its own vocabulary, and its model."""

    def __init__(self, target: Vocabulary, model: Reciter, draft: Vocabulary, width: int = 2) -> None:
        self.model = model
        self.inner = model_draft(model, width, least_path_probability=0.02)
        self.draft = RetokenizingSpeculator(self.inner, VocabularyMapping.between(target, draft))


def retokenizing(target: Vocabulary, draft: Vocabulary, slots: int = 2048, width: int = 2) -> Retokenizing:
    return Retokenizing(target, Reciter(draft, slots=slots), draft, width)


class TestIntersection:
    @pytest.mark.parametrize("params", LAWS)
    def test_the_same_network_with_its_vocabulary_permuted_is_as_good_as_the_target_itself(
        self, params: SamplingParams
    ) -> None:
        """It predicts every draw, so ids, noise and positions are the target's."""
        limits = {"sampling": params, "depth": 4, "nodes": 200}
        output = decoded(llama(), PROMPT, params, 40)
        itself = accepted(DraftedRequest(model_draft(llama(), 1), PROMPT, **limits), output)
        mapped = intersection_draft(llama(permuted=True), PERMUTED, 1)
        assert accepted(DraftedRequest(mapped, PROMPT, **limits), output) == itself
        if params.greedy or (not params.top_k and params.top_p == 1 and not params.frequency_penalty):
            assert itself == (32, 8), "4 of 5 tokens are guessed, the fifth is the target's bonus"

    @pytest.mark.parametrize("params", LAWS[:3])
    def test_tokens_outside_it_are_written_and_never_guessed(self, params: SamplingParams) -> None:
        """The draft has more input tokens than the target; noise uses the target's positions."""
        tokens = [20, 3, 9, *PROMPT]
        request = finished(intersection_draft(llama(), PARTIAL, 2), tokens, sampling=params, depth=4, nodes=400)
        tree, model = request.tree, llama()
        assert max(tree.depths) == 4
        for node in (0, *tree.nodes()):
            children = [tree.tokens[child] for child in tree.children(node)]
            best = likeliest(model, [*tokens, *tree.path_tokens(node)], params)
            assert children in ([], best[:2])
            assert not STRANGERS.keys() & set(children)

    @pytest.mark.parametrize("seed", range(4))
    def test_guesses_after_any_commits_are_those_of_a_fresh_start(self, seed: int) -> None:
        rng = random.Random(seed)
        draft = intersection_draft(llama(), PARTIAL, 2)
        limits = {"sampling": LAWS[seed], "depth": 4, "nodes": 400}
        request = DraftedRequest(draft, PROMPT, **limits)
        for _ in range(20):
            request.grow(rounds=1)
            strange = [rng.choice([*STRANGERS, 1, 2])] if rng.random() < 0.3 else []
            request.commit([*strange, *drawn_tokens(request.tree, rng, VOCABULARY)])
            draft.check_integrity()
        request.grow()
        draft.close(1)
        fresh = finished(draft, request.tokens, output=len(request.tokens) - len(PROMPT), **limits)
        assert request.children() == fresh.children()

    def test_positions_that_end_are_the_drafts(self) -> None:
        """The prompt takes eight of ten positions, which leaves a node and its child."""
        model = TableModel(VOCABULARY, 512, 10)
        draft = intersection_draft(model, PARTIAL, 1)
        assert PARTIAL.to_draft_tokens([20, 3, 9, 1, 1]) == [5, 5, 5, 3, 7, 61, 1, 1]
        assert finished(draft, [20, 3, 9, 1, 1]).tree.size == 2
        draft.close(1)
        with pytest.raises(DraftError, match="10 tokens; the draft's positions end at 10"):
            DraftedRequest(draft, [20, 20, 20, 1])
        request = finished(draft, [20, 20])
        with pytest.raises(DraftError, match="11 tokens"):
            request.commit([20, 3])
        draft.close(1)
        draft.check_integrity()


def likeliest(model: Model, tokens: Sequence[int], params: SamplingParams) -> list[int]:
    """Tokens ranked as a target would draw them with the draft's logits, without `STRANGERS`."""
    slot_table, written = SlotTable(), [each for token in tokens for each in STRANGERS.get(token, (token,))]
    slot_table.slots.extend(range(1, len(written) + 1))
    rows = [slot_table.row(token, i) for i, token in enumerate(written)]
    logits = model.run(rows, [len(rows) - 1]).logits.clone()
    logits[:, list(STRANGERS)] = -1e9
    row = SamplingRow(params, len(tokens), History(params, tokens, [], VOCABULARY))
    return [int(token) for token in scores(logits, [row])[0].argsort(descending=True)]


class TestRetokenizing:
    @pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "sampled"])
    @PAIRS
    def test_a_draft_that_knows_the_text_is_mostly_accepted(
        self, target: Vocabulary, draft: Vocabulary, params: SamplingParams
    ) -> None:
        """However the tokenizers split words and characters. At most four of five tokens can be accepted; by chance one
        of a hundred would be."""
        prompt = target.tokenizer.encode(TALE[:30])
        output = decoded(Reciter(target, sure=7.0), prompt, params, 100)
        request = DraftedRequest(retokenizing(target, draft).draft, prompt, sampling=params, depth=4, nodes=200)
        assert accepted(request, output)[0] > 55

    def test_the_same_network_with_its_vocabulary_permuted_guesses_what_the_target_would(self) -> None:
        """Each token is a number, so a text has one encoding. The log-probabilities of a path are the draft's."""
        output = decoded(llama(), PROMPT, GREEDY, 40)
        chain = RetokenizingSpeculator(model_draft(llama(permuted=True), 1), PERMUTED)
        assert accepted(DraftedRequest(chain, PROMPT, depth=4, nodes=200), output) == (32, 8)
        own, other = (model_draft(llama(permuted=each), 2, None, 0.01) for each in (False, True))
        mapped = finished(RetokenizingSpeculator(other, PERMUTED), PROMPT, depth=4, nodes=100)
        assert mapped.guesses() == pytest.approx(finished(own, PROMPT, depth=4, nodes=100).guesses(), abs=1e-4)

    @pytest.mark.parametrize(
        ("drafts", "ended"),
        [((2, 300), True), ((0, 0), False), ((3 + 0xE4, 2), False)],
        ids=["end of text", "unknown", "half a character"],
    )
    def test_of_the_special_tokens_only_an_end_of_text_is_guessed(self, drafts: tuple[int, int], ended: bool) -> None:
        """The draft's end of text becomes the target's; nothing after it is drafted."""

        class Scripted(Reciter):
            def _next(self, row: Row) -> int:
                return drafts[row.token == drafts[0]]

        draft = Retokenizing(BYTES, Scripted(SPACES), SPACES, 1).draft
        guesses = finished(draft, BYTES.tokenizer.encode("the winter")).guesses()
        assert list(guesses) == [(BYTES.tokenizer.token_id("<|end|>"),)] * ended

    def test_half_a_character_is_completed_and_nothing_else_is_guessed(self) -> None:
        """The draft's path has the whole character; its probability is that of the rest."""
        at = TALE.index("京")
        half = LETTERS.tokenizer.encode_fragment("京")
        drafting = retokenizing(LETTERS, SPACES, width=3)
        request = finished(drafting.draft, [*LETTERS.tokenizer.encode(TALE[:at]), *half[:2]])
        assert [text_of(LETTERS.tokenizer, [token]) for token in request.children()] == ["京".encode()[2:]]
        tree = drafting.inner.tree(1)
        known = [tree.path_log_probs[node] for node in tree.nodes() if tree.depths[node] == 3]
        assert request.children()[half[2]] == pytest.approx(max(known))

    def test_a_guess_that_contradicts_the_half_that_is_there_is_none(self) -> None:
        """Although the target's half and the draft's other half would be a character."""
        tokens = [*LETTERS.tokenizer.encode("東東"), *LETTERS.tokenizer.encode_fragment("京")[:2]]
        drafting = Retokenizing(LETTERS, Reciter(SPACES, "東" * 9), SPACES, 1)
        assert finished(drafting.draft, tokens).tree.size == 0
        assert drafting.inner.tree(1).size > 0

    def test_what_was_guessed_is_read_again_when_the_target_writes_it_otherwise(self) -> None:
        """Letter by letter, while the draft adds no nodes."""
        drafting = retokenizing(BYTES, LETTERS)
        request = finished(drafting.draft, BYTES.tokenizer.encode("the"))
        letters = [BYTES.tokenizer.pieces.index(bytes([byte])) for byte in b" tra"]
        assert not request.guessed(letters)
        drafting.inner.limit(Limit(1, 9, 0))
        request.commit(letters)
        request.grow()
        assert request.guessed(BYTES.tokenizer.encode_fragment(" traveller")[1:])

    def test_a_token_that_the_target_has_no_number_for_is_not_guessed(self) -> None:
        small = Vocabulary("small", BYTES.tokenizer, 300)
        prompt = [token for token in BYTES.tokenizer.encode(TALE[:40]) if token < 300]
        request = finished(retokenizing(small, LETTERS).draft, prompt)
        assert request.tree.size > 0
        assert max(request.tree.tokens) < 300

    @PAIRS
    def test_guesses_after_any_commits_are_those_of_a_fresh_start(self, target: Vocabulary, draft: Vocabulary) -> None:
        """After any rewinds nothing is stale."""
        rng = random.Random(1)
        drafting = retokenizing(target, draft).draft
        request = DraftedRequest(drafting, target.tokenizer.encode(TALE[:12]))
        for _ in range(25):
            request.grow(rounds=1)
            request.commit(drawn_tokens(request.tree, rng, VOCABULARY))
            drafting.check_integrity()
        request.grow()
        fresh = finished(retokenizing(target, draft).draft, request.tokens)
        assert fresh.guesses().keys() <= request.guesses().keys()

    def test_what_was_computed_stays(self) -> None:
        """A commit costs the tokens that it changed, not the prompt."""
        drafting, prompt = retokenizing(SPACES, LETTERS), SPACES.tokenizer.encode(TALE)
        request = finished(drafting.draft, prompt)
        for size in range(1, 12):
            del drafting.model.ran[:]
            request.commit(SPACES.tokenizer.encode_fragment("and odd"[:size])[-1:])
            request.grow(rounds=1)
            assert len(drafting.model.ran) < 40 < len(prompt)

    def test_a_request_without_slots_is_dropped(self) -> None:
        """When slots run out; closing the request frees its slots."""
        draft = retokenizing(BYTES, LETTERS, slots=20).draft
        with pytest.raises(DraftError, match="out of slots"):
            DraftedRequest(draft, BYTES.tokenizer.encode(TALE))
        request = finished(draft, BYTES.tokenizer.encode("the"))
        with pytest.raises(DraftError, match="out of slots"):
            request.commit(BYTES.tokenizer.encode(" traveller" * 5))
        draft.close(1)
        draft.check_integrity()
        assert draft.grow() == {}


class TestTranscript:
    @PAIRS
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
        once = DraftTranscript(mapping, BYTES.tokenizer.encode("the" + TALE * 5))
        for each in (transcript, once):
            assert text_of(SPACES.tokenizer, each.tokens) == (" the" + TALE * 5).encode()

    @pytest.mark.parametrize("text", ["word   " * 100, "x" * 2000], ids=["words", "no spaces"])
    def test_text_is_settled_where_a_word_begins_if_there_is_one(self, text: str) -> None:
        transcript = DraftTranscript(VocabularyMapping.between(BYTES, LETTERS), BYTES.tokenizer.encode(text))
        assert transcript.tokens == LETTERS.tokenizer.encode(text)

    def test_half_a_character_waits_for_the_other_half(self) -> None:
        transcript = DraftTranscript(VocabularyMapping.between(LETTERS, BYTES), LETTERS.tokenizer.encode("a"))
        tokens, text = LETTERS.tokenizer.encode_fragment("東"), "東".encode()
        for token in tokens[:2]:
            transcript.extend([token])
        assert (transcript.pending, transcript.window) == (text[:2], b"a" + text[:2])
        assert text_of(BYTES.tokenizer, transcript.tokens) == b"a"
        transcript.extend(tokens[2:])
        assert text_of(BYTES.tokenizer, transcript.tokens) == b"a" + text

    def test_what_never_becomes_a_character_is_replaced(self) -> None:
        first, encode = LETTERS.tokenizer.encode_fragment("東")[:1], LETTERS.tokenizer.encode
        mapping = VocabularyMapping.between(LETTERS, BYTES)
        transcript = DraftTranscript(mapping, [*first, *encode("a")])
        assert text_of(BYTES.tokenizer, transcript.tokens) == "\ufffda".encode()
        special = LETTERS.tokenizer.special_ids - {LETTERS.tokenizer.token_id("<|end|>")}
        transcript.extend([*first, *special, *encode("b")])
        ends = BYTES.tokenizer.encode_fragment("\ufffda\ufffd"), BYTES.tokenizer.encode_fragment("b")
        assert transcript.tokens == [*ends[0], *mapping.draft_ids[min(special)], *ends[1]]
        assert (transcript.window, transcript.pending) == (b"b", b"")

    def test_a_prompt_of_which_nothing_is_left_is_something_all_the_same(self) -> None:
        assert DraftTranscript(VocabularyMapping.between(SPACES, BYTES), [1]).tokens


class TestStableTokens:
    @TOKENIZERS
    @settings(deadline=None)
    @given(data=st.data())
    def test_they_begin_the_text(self, tokenizer: Tokenizer, data: st.DataObject) -> None:
        """Each token has its end; if the text is final, the tokens cover it."""
        text = data.draw(st.one_of(st.text(min_size=1, max_size=20), st.just(TALE[:50]))).encode()
        at = data.draw(st.integers(0, len(text)))
        final = data.draw(st.booleans())
        tokens = StableTokens(tokenizer).of(text[at:], text[:at], final=final)
        for count, (_, length) in enumerate(tokens, 1):
            assert text_of(tokenizer, [token for token, _ in tokens[:count]]) == text[at : at + length]
        whole = text[:at].decode(errors="ignore").encode() == text[:at]
        if final and at < len(text) and (whole or tokens):
            assert tokens[-1][1] == len(text) - at

    def test_what_more_text_could_change_is_left_out(self) -> None:
        def of(text: str, last: int = -1) -> list[int]:
            return [token for token, _ in StableTokens(BYTES.tokenizer).of(text.encode(), b"", last)]

        whole = BYTES.tokenizer.encode_fragment(" the traveller")
        assert text_of(BYTES.tokenizer, whole[:2]) == b" the tra"
        assert of(" the traveller") == whole[:2]
        assert text_of(BYTES.tokenizer, of(" th")) == b" t"
        assert of(" t") == []
        assert of(" the traveller", whole[-1]) == whole, "but what a draft has, too"
        assert of(" the traveller sa", whole[-1])[:3] == whole, "and what is followed"

    def test_text_before_it_counts(self) -> None:
        """The encoding of `ller` after `trave` depends on the tokens of `trave`."""
        stable = StableTokens(BYTES.tokenizer)
        assert stable.of(b"veller said he", b" tra")[0] == (BYTES.tokenizer.encode_fragment(" traveller")[1], 6)
        assert text_of(BYTES.tokenizer, [t for t, _ in stable.of(b"eller said he", b" trav")]).startswith(b"eller said")

    def test_a_character_is_completed_only_where_the_text_before_allows_it(self) -> None:
        stable, text = StableTokens(LETTERS.tokenizer), "東".encode()
        assert stable.of(text[2:], b"a" + text[:2], final=True) == [(LETTERS.tokenizer.encode_fragment("東")[-1], 1)]
        assert stable.of(text[2:], b"\xff" + text[:2], final=True) == []

    def test_a_tokenizer_that_changes_what_it_is_given_proposes_nothing(self) -> None:
        backend = byte_level()._backend
        backend.normalizer = normalizers.Lowercase()
        stable = StableTokens(Tokenizer(backend, {}, None))
        assert stable.of(b" The traveller", b"") == []
        assert stable.of(b" the traveller", b"THE")
