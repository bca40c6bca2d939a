"""Drafting among the common tokens of two vocabularies: the predictions equal those in the target's vocabulary."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from paceline.config import EngineConfig, SamplingParams
from paceline.core.sampling import History, SamplingRow, scores
from paceline.core.tree import ROOT, TokenTree
from paceline.drafting.methods.draft_model import DraftModelSpeculator
from paceline.drafting.speculator import Commit, DraftError, Opening
from paceline.drafting.vocabulary.intersection_draft import IntersectionDraft
from paceline.drafting.vocabulary.vocabulary_mapping import VocabularyMapping
from paceline.model import Model, SlotTable
from paceline.model.loading import build
from paceline_lab.fake_models.table_model import TableModel
from tests.helpers.llamas import LAWS, VOCABULARY, peaked_llama
from tests.helpers.seen import nodes_of, root_of
from tests.helpers.vocabularies import accepted, grow, longest, numbered, permuted_llama
from tests.unit.test_draft_model import PROMPT, committed, decoded

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


def llama(*, permuted: bool = False) -> Model:
    network = permuted_llama(NUMBERS) if permuted else peaked_llama()
    return build(network, "llama", EngineConfig(slots=1024), "", [])


def intersection(model: Model, mapping: VocabularyMapping, width: int = 3) -> IntersectionDraft:
    return IntersectionDraft(model, mapping, width)


@pytest.mark.parametrize("params", LAWS)
def test_the_same_network_with_its_vocabulary_permuted_is_as_good_as_the_target_itself(params: SamplingParams) -> None:
    """It predicts every draw, so ids, noise and positions are the target's."""
    output = decoded(llama(), PROMPT, params, 40)
    itself = accepted(DraftModelSpeculator(llama(), 1), PROMPT, output, params)
    mapped = accepted(intersection(llama(permuted=True), PERMUTED, 1), PROMPT, output, params)
    assert mapped == itself
    if params.greedy or (not params.top_k and params.top_p == 1 and not params.frequency_penalty):
        assert itself == (32, 8), "4 of 5 tokens are guessed, the fifth is the target's bonus"


@pytest.mark.parametrize("params", LAWS[:3])
def test_tokens_outside_the_intersection_are_written_and_never_guessed(params: SamplingParams) -> None:
    """The draft has more input tokens than the target; noise uses the target's positions."""
    tokens = [20, 3, 9, *PROMPT]
    draft, model = intersection(llama(), PARTIAL, 2), llama()
    tree = opened(draft, tokens, params)
    assert max(len(node.path()) for node in nodes_of(tree)) == 4
    for node in [root_of(tree), *nodes_of(tree)]:
        path = [each.token for each in node.path()]
        best = likeliest(model, [*tokens, *path], params, len(tokens) + len(path))
        assert list(node.children) in ([], best[:2])
        assert not STRANGERS.keys() & node.children.keys()


@pytest.mark.parametrize("seed", range(4))
def test_guesses_after_any_commits_are_those_of_a_fresh_start(seed: int) -> None:
    rng = random.Random(seed)
    draft, tokens = intersection(llama(), PARTIAL, 2), [*PROMPT]
    tree = opened(draft, tokens, LAWS[seed], rounds=2)
    for _ in range(20):
        new = [rng.choice([*STRANGERS, 1, 2]), *committed(tree, rng)] if rng.random() < 0.3 else committed(tree, rng)
        draft.commit(Commit(1, tree.position, new, 0))
        tree.commit(new)
        tokens += new
        draft.check_integrity()
        grown = draft.grow()
        if grown:
            tree.graft(grown[1], 1000)
    grow(draft, tree)
    draft.close(1)
    fresh = opened(draft, tokens, LAWS[seed], output=len(tokens) - len(PROMPT))
    assert {t: n.log_prob for t, n in root_of(tree).children.items()} == {
        t: n.log_prob for t, n in root_of(fresh).children.items()
    }


def test_positions_that_end_are_the_drafts() -> None:
    """The prompt takes eight of ten positions, which leaves a node and its child."""
    table = TableModel(VOCABULARY, 512, 10)
    tree = opened(intersection(table, PARTIAL, 1), [20, 3, 9, 1, 1], GREEDY)
    assert PARTIAL.to_draft_tokens([20, 3, 9, 1, 1]) == [5, 5, 5, 3, 7, 61, 1, 1]
    assert tree.size == 2
    with pytest.raises(DraftError, match="10 tokens; the draft's positions end at 10"):
        intersection(table, PARTIAL).open(Opening(1, [20, 20, 20, 1], 0, GREEDY, 4, 100))
    draft = intersection(table, PARTIAL)
    opened(draft, [20, 20], GREEDY)
    with pytest.raises(DraftError, match="11 tokens"):
        draft.commit(Commit(1, 1, [20, 3], 0))
    draft.close(1)
    draft.check_integrity()


def test_too_small_an_intersection_is_refused() -> None:
    few = VocabularyMapping.between(TARGET, numbered(range(VOCABULARY - 3, 2 * VOCABULARY), "far"))
    with pytest.raises(ValueError, match="have only 3 tokens in common: choose another draft"):
        intersection(TableModel(VOCABULARY, 512, 64), few)


def test_it_passes_for_a_draft_of_the_targets_vocabulary() -> None:
    draft = intersection(TableModel(VOCABULARY, 512, 64), PERMUTED)
    assert draft.vocabulary_fingerprint == TARGET.tokenizer.fingerprint
    assert draft.vocabulary_size == VOCABULARY


GREEDY = SamplingParams(temperature=0.0)


def opened(
    draft: IntersectionDraft, tokens: Sequence[int], params: SamplingParams, *, output: int = 0, rounds: int = 100
) -> TokenTree:
    """The tree after some rounds."""
    draft.open(Opening(1, tokens, output, params, 4, 400))
    tree = TokenTree(len(tokens) - 1, tokens[-1])
    for _ in range(rounds):
        if growth := draft.grow().get(1):
            tree.graft(growth, 1000)
        elif not draft.behind:
            break
    return tree


def likeliest(model: Model, tokens: Sequence[int], params: SamplingParams, position: int) -> list[int]:
    """Tokens ranked as a target would draw them with the draft's logits, without `STRANGERS`."""
    slot_table, written = SlotTable(), [each for token in tokens for each in STRANGERS.get(token, (token,))]
    slot_table.slots.extend(range(1, len(written) + 1))
    rows = [slot_table.row(token, i) for i, token in enumerate(written)]
    logits = model.run(rows, [len(rows) - 1]).logits.clone()
    logits[:, list(STRANGERS)] = -1e9
    ranked = scores(logits, [SamplingRow(params, position, History(params, tokens, [], VOCABULARY))])[0]
    return [int(token) for token in ranked.argsort(descending=True)]


def test_the_longest_path_is_what_was_guessed() -> None:
    tree = TokenTree(0, 0)
    tree.add(tree.add(ROOT, 5, -0.1), 6, -0.1)
    assert longest(tree, [5, 6, 7]) == [5, 6]
    assert longest(tree, [6]) == []
