"""PARD: distributions of several positions in one pass, and what all parallel drafts share."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import EngineConfig, SamplingParams
from paceline.core.sampling import History, SamplingRow, draw
from paceline.drafting.cached_draft import PREFILL_ROWS
from paceline.drafting.draw_prediction import MAX_ROWS
from paceline.drafting.methods.pard import PardSpeculator, mask_token_of, matches
from paceline.drafting.speculator import DraftError
from paceline.model import Model
from paceline.model.checkpoint import Checkpoint, CheckpointError
from paceline.model.loading import build
from paceline.model.model import ModelOutput
from paceline.model.rows import Row as ModelRow
from paceline_lab.fake_models.table_model import TableModel
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.feeding import Feeding, Guess
from tests.helpers.llamas import LAWS, VOCABULARY, peaked_llama
from tests.helpers.seen import nodes_of, root_of

MASK = VOCABULARY - 1
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
NETWORK = peaked_llama()


def llama(slots: int = 1024, max_model_len: int | None = None) -> Model:
    return build(peaked_llama(), "llama", EngineConfig(slots=slots, max_model_len=max_model_len), "", [])


def pard(ahead: int = 4, width: int = 3, model: Model | None = None, least: float = 0.0) -> PardSpeculator:
    return PardSpeculator(model or llama(), MASK, ahead, width, least)


def request_of(speculator: PardSpeculator, tokens: Sequence[int] = PROMPT, **limits: int) -> Feeding:
    return Feeding(speculator, NETWORK, tokens, **limits)  # type: ignore[arg-type]


@torch.no_grad()
def distributions(tokens: Sequence[int], ahead: int) -> torch.Tensor:
    """Log-probabilities [ahead, vocabulary] after these tokens, by the network alone and in one piece."""
    masked = torch.tensor([[*tokens, *[MASK] * (ahead - 1)]])
    return NETWORK(masked).logits[0, len(tokens) - 1 :].log_softmax(-1)


def check(request: Feeding, guesses: Sequence[Guess], ahead: int, width: int) -> None:
    """Each guess has its depth's log-probability and is among the best; the likeliest path is there."""
    expected = distributions(request.tokens, ahead)
    best = expected.topk(width).indices.tolist()
    for path, log_prob in guesses:
        assert log_prob == pytest.approx(float(expected[len(path) - 1, path[-1]]), abs=1e-3)
        assert path[-1] in best[len(path) - 1]
    likeliest = [tokens[0] for tokens in best]
    assert len(request.tree.match(likeliest)) == len(likeliest)


class TestDistributions:
    @pytest.mark.parametrize("ahead", [1, 2, 5])
    @pytest.mark.parametrize("prompt", [PROMPT, [1], [2, 2, 2], list(range(60)), [*range(63), 9]])
    def test_they_are_of_the_root_and_of_the_masks_after_it(self, prompt: list[int], ahead: int) -> None:
        request = request_of(pard(ahead), prompt)
        guesses = request.grow()
        check(request, guesses, ahead, 3)
        assert len(guesses) == sum(3**depth for depth in range(1, ahead + 1))

    def test_after_commits_they_are_those_of_a_fresh_start(self) -> None:
        """Masks leave nothing behind, and accepted tokens are run as ordinary rows."""
        rng = random.Random(1)
        speculator = pard(4, 2)
        request = request_of(speculator)
        remaining = 0
        for _ in range(40):
            check(request, request.grow(), 4, 2)
            speculator.check_integrity()
            chosen = rng.choice(list(nodes_of(request.tree))).path()
            request.commit([*(node.token for node in chosen), *rng.choices(range(VOCABULARY), k=rng.randrange(2))])
            remaining += request.tree.size > 0
        assert 5 < remaining < 35

    def test_remaining_nodes_get_children_of_the_new_distributions(self) -> None:
        request = request_of(pard(3, 1))
        [first, second, _] = [path[-1] for path, _ in request.grow()]
        request.commit([first])
        new = request.grow()
        best = [int(each.argmax()) for each in distributions(request.tokens, 3)]
        paths = {path for path, _ in new}
        assert second in root_of(request.tree).children
        assert any(len(path) == 3 and path[-1] == best[2] for path in paths), "one deeper than before"
        assert (second,) not in paths, "it is in the tree already"

    @pytest.mark.parametrize("params", [each for each in LAWS if not each.penalised and not each.bad_words])
    def test_they_have_the_noise_of_the_targets_draws(self, params: SamplingParams) -> None:
        """The likeliest guess at each depth is the target's draw from this distribution."""
        request = Feeding(pard(3, 2), NETWORK, PROMPT, sampling=params)
        request.grow()
        history = History(params, PROMPT, [], VOCABULARY)
        rows = [SamplingRow(params, len(PROMPT) + depth, history, [1] * depth) for depth in range(3)]
        expected = draw(distributions(PROMPT, 3), rows).tolist()
        children = root_of(request.tree).children.values()
        for token in expected:
            likeliest = max(children, key=lambda node: node.log_prob)
            assert likeliest.token == token
            children = likeliest.children.values()


class TestLimits:
    @pytest.mark.parametrize("depth", [0, 1, 3, 9])
    def test_depth(self, depth: int) -> None:
        request = request_of(pard(5, 1), depth=depth)
        assert len(request.grow()) == min(depth, 5)

    @pytest.mark.parametrize("nodes", [0, 1, 7, 40])
    def test_nodes(self, nodes: int) -> None:
        request = request_of(pard(4, 3), nodes=nodes)
        assert len(request.grow()) == nodes

    def test_unlikely_guesses_are_not_added(self) -> None:
        request = request_of(pard(4, 3, least=0.05))
        request.grow()
        chances = [node.path_log_prob for node in nodes_of(request.tree)]
        assert min(chances) > torch.tensor(0.05).log()
        assert len(chances) < 120

    def test_a_paused_request_runs_each_token_once(self) -> None:
        model = Recording(512, 512)
        speculator = PardSpeculator(model, MASK, 4, 1, 0.0)
        request = request_of(speculator, nodes=0)
        for token in (7, 8, 9):
            assert request.grow() == []
            request.commit([token])
        assert not any(row.token == MASK for rows in model.passes for row in rows)
        request.limit(20, 1000)
        assert len(request.grow()) == 4
        request.commit([10, 11])
        request.grow()
        positions = [row.position for rows in model.passes for row in rows if row.token != MASK]
        assert positions == list(range(len(request.tokens))), "each token ran once"

    def test_a_raised_limit_needs_no_pass(self) -> None:
        model = Recording(512, 512)
        request = request_of(PardSpeculator(model, MASK, 4, 3, 0.0), nodes=5)
        assert len(request.grow()) == 5
        passes = len(model.passes)
        request.limit(20, 12)
        assert len(request.grow()) == 7
        assert len(model.passes) == passes

    def test_a_lowered_limit_holds_for_known_distributions(self) -> None:
        request = request_of(pard(4, 3), nodes=1)
        assert len(request.grow()) == 1
        request.limit(1, 1000)
        assert sorted(len(path) for path, _ in request.grow()) == [1, 1]

    def test_no_position_at_or_beyond_the_models_last(self) -> None:
        request = request_of(pard(4, 1, llama(max_model_len=10)))
        assert len(request.grow()) == 2
        request.commit([1])
        assert len(request.grow()) == 1
        with pytest.raises(DraftError, match="10 tokens"):
            request.commit([1])

    def test_what_the_model_cannot_run_is_refused(self) -> None:
        with pytest.raises(DraftError, match="vocabulary"):
            request_of(pard(), [1, VOCABULARY])


class Recording(TableModel):
    """Records the rows of each pass."""

    def __init__(self, slots: int, positions: int) -> None:
        super().__init__(VOCABULARY, slots, positions)
        self.passes: list[list[ModelRow]] = []

    def run(self, rows: Sequence[ModelRow], wanted: Sequence[int], hidden_layers: Sequence[int] = ()) -> ModelOutput:
        self.passes.append(list(rows))
        return super().run(rows, wanted, hidden_layers)


class TestRounds:
    def test_a_root_is_run_once(self) -> None:
        model = Recording(512, 512)
        request = request_of(PardSpeculator(model, MASK, 4, 2, 0.0))
        request.grow()
        request.grow()
        assert [len(rows) for rows in model.passes] == [len(PROMPT) + 3]

    def test_a_long_prompt_takes_several_rounds(self) -> None:
        model = Recording(2048, 2048)
        prompt = [5] * (2 * PREFILL_ROWS + 10)
        assert len(request_of(PardSpeculator(model, MASK, 4, 1, 0.0), prompt).grow()) == 4
        assert [len(rows) for rows in model.passes] == [PREFILL_ROWS, PREFILL_ROWS, 13]

    def test_many_requests_take_turns_by_link(self) -> None:
        """A link's only request is in the first round, though another link has many."""
        speculator = PardSpeculator(TableModel(VOCABULARY, 8192, 512), MASK, 32, 1, 0.0)
        for key in range(2, 32):
            request_of(speculator, [key, 1], key=key, owner=1)
        request_of(speculator, [1, 1], key=1, owner=2)
        first = speculator.grow()
        assert len(first) == MAX_ROWS // 32
        assert 1 in first
        seen = set(first)
        while grown := speculator.grow():
            assert not seen & set(grown)
            seen |= set(grown)
        assert seen == set(range(1, 32))
        assert not speculator.behind

    def test_links_take_turns(self) -> None:
        """If a round has one request, the next round has another link's."""
        speculator = PardSpeculator(TableModel(VOCABULARY, 8192, 512), MASK, 256, 1, 0.0)
        for key in range(6):
            request_of(speculator, [key + 1, 1], key=key, owner=key // 3)
        order = [key // 3 for _ in range(6) for key in speculator.grow()]
        assert order[:2] in ([0, 1], [1, 0])
        assert len(order) == 6


class TestSlots:
    def test_masks_use_free_slots_and_free_them(self) -> None:
        speculator = pard(4, 1, llama(slots=256))
        request = request_of(speculator, [1] * 253)
        assert len(request.grow()) == 4
        speculator.check_integrity()
        request.commit([1])
        assert request.grow() == [], "two are free, three are needed"
        assert not speculator.behind
        speculator.check_integrity()
        request.commit([2, 3])
        with pytest.raises(DraftError, match="out of slots: 1 needed, 0 of 256 free"):
            request.commit([4])

    @given(st.integers(0, 2**32), st.integers(20, 120), st.integers(1, 6))
    @settings(max_examples=40, deadline=None)
    def test_none_is_lost_in_any_sequence_of_calls(self, seed: int, slots: int, ahead: int) -> None:
        rng = random.Random(seed)
        speculator = PardSpeculator(TableModel(VOCABULARY, slots, 60), MASK, ahead, 2, 0.0)
        requests: dict[int, Feeding] = {}
        for _ in range(60):
            key = rng.randrange(4)
            action = rng.choice(["open", "commit", "commit", "close", "limit", "grow", "grow"])
            try:
                if action == "open":
                    prompt = rng.choices(range(VOCABULARY), k=rng.randint(1, 40))
                    requests[key] = request_of(speculator, prompt, key=key, nodes=rng.choice([0, 1, 10, 100]))
                elif action == "commit" and key in requests:
                    best = [requests[key].tree.tokens[node] for node in requests[key].tree.best(3, 1)]
                    requests[key].commit([rng.choice([*best, 5]), *rng.choices(range(9), k=rng.randrange(3))])
                elif action == "close":
                    requests.pop(key, None)
                    speculator.close(key)
                elif action == "limit" and key in requests:
                    requests[key].limit(rng.randint(0, 8), rng.choice([0, 1, 100]))
                else:
                    for grown, growth in speculator.grow().items():
                        assert requests[grown].tree.graft(growth, 1000) == len(growth)
            except DraftError:
                requests.pop(key, None)
                speculator.close(key)
            speculator.check_integrity()


class TestCheckpoints:
    def folder(self, path: Path, **keys: object) -> Checkpoint:
        save_checkpoint(path)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | keys))
        return Checkpoint(path)

    def test_the_configuration_names_the_mask(self, tmp_path: Path) -> None:
        checkpoint = self.folder(tmp_path, pard_token=17)
        assert matches(checkpoint)
        assert mask_token_of(checkpoint) == 17
        assert mask_token_of(self.folder(tmp_path / "other", ptd_token_id=5)) == 5

    @pytest.mark.parametrize(
        ("keys", "complaint"),
        [
            ({}, "names no pard_token"),
            ({"pard_token": VOCABULARY}, f"no row of its embedding of {VOCABULARY}"),
            ({"pard_token": -1}, "no row of its embedding"),
            ({"pard_token": "<m>"}, "'<m>'"),
            ({"pard_token": 5, "pard2_target_layers": [1, 2]}, "PARD-2"),
        ],
    )
    def test_an_unsuitable_model_is_refused(self, tmp_path: Path, keys: dict[str, object], complaint: str) -> None:
        with pytest.raises(CheckpointError, match=complaint):
            mask_token_of(self.folder(tmp_path, **keys))

    def test_a_plain_model_does_not_match(self, tmp_path: Path) -> None:
        assert not matches(self.folder(tmp_path))
