"""The same tokens with a draft of another vocabulary, in one process and over the wire."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.drafting import Speculator, build_speculator
from paceline.drafting.network_speculator import NetworkSpeculator
from paceline.drafting.retokenizing_speculator import RetokenizingSpeculator
from paceline.drafting.vocabulary.vocabulary_mapping import VocabularyMapping
from paceline.engine.draft_client import DraftClient, LocalDraftClient, NoDraftClient
from paceline.engine.engine import Engine
from paceline.llm import LLM, VocabularyMismatchError
from paceline.messages import GenerationRequest
from paceline.model import load
from tests.exactness.test_engine import FREE
from tests.exactness.test_wire import same_tokens, served
from tests.helpers.drafts import intersection_draft, model_draft
from tests.helpers.engine_runs import run
from tests.helpers.llamas import VOCABULARY, peaked_llama
from tests.helpers.vocabularies import TALE, Reciter, byte_level, metaspace, numbered, permuted_llama, save, vocabulary

NUMBERS = random.Random(3).sample(range(VOCABULARY), VOCABULARY)
ENGINE = EngineConfig(slots=2048)
MAPPINGS = pytest.mark.parametrize("mapping", ["intersection", "strings"])
TEMPERATURES = pytest.mark.parametrize("temperature", [0.0, 0.8])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("target"), peaked_llama(), numbered(range(VOCABULARY)))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same network, with other ids."""
    return save(tmp_path_factory.mktemp("draft"), permuted_llama(NUMBERS), numbered(NUMBERS))


def speculation(draft: str, mapping: str, width: int = 3) -> SpeculativeConfig:
    return SpeculativeConfig.model_validate(
        {
            "method": "draft_model",
            "model": draft,
            "vocabulary_mapping": mapping,
            "tree_width": width,
            "least_path_probability": 0.0,
            "draft_schedule": "lockstep",  # so that no guess hangs on how fast this machine is
            "row_budget": False,
        }
    )


@TEMPERATURES
@MAPPINGS
def test_a_draft_of_another_vocabulary_changes_no_token(
    target: str, draft: str, mapping: str, temperature: float
) -> None:
    llm = LLM(target, speculation(draft, mapping), ENGINE)
    sampling = SamplingParams(temperature=temperature, seed=4, max_tokens=60)
    prompts = ["1 2 3", "7 " * 30, "63"]
    guessed, plain = llm.generate(prompts, sampling), llm.generate(prompts, sampling, speculative=False)
    assert [c.tokens for c in guessed] == [c.tokens for c in plain]
    # With noise only one way sees a draw coming.
    assert sum(c.speculation.drafted_tokens for c in guessed) > 0
    assert temperature > 0 or sum(c.speculation.accepted_tokens for c in guessed) > 20


@TEMPERATURES
@MAPPINGS
async def test_over_the_wire_too(target: str, draft: str, mapping: str, temperature: float) -> None:
    """The target waits for the draft, so there are always draft tokens."""
    model, config = load(target, ENGINE), speculation(draft, mapping, width=1)
    async with served(model, config, build_speculator(config, ENGINE, model.target_weights, target)) as (link, drafts):
        stats = await same_tokens(link, temperature, drafts)
        assert sum(each.drafted_tokens for each in stats) > 0
        assert sum(each.accepted_tokens for each in stats) > 0


@pytest.mark.parametrize("mapping", ["none", "intersection", "strings"])
def test_the_configuration_names_the_way_which_the_targets_own_vocabulary_does_not_need(
    target: str, draft: str, mapping: str
) -> None:
    model = load(target, ENGINE)
    built = build_speculator(speculation(draft, mapping), ENGINE, model.target_weights, target)
    assert isinstance(built, RetokenizingSpeculator) is (mapping == "strings")
    assert (built.description.vocabulary_fingerprint == model.fingerprint) is (mapping != "none")
    assert built.description.vocabulary_size == model.vocabulary_size
    own = build_speculator(speculation(target, mapping), ENGINE, model.target_weights, target)
    assert isinstance(own, NetworkSpeculator)
    assert own._network.mapping is None


def test_a_mapping_and_the_targets_name_are_needed(target: str, draft: str) -> None:
    with pytest.raises(VocabularyMismatchError, match='"vocabulary_mapping" to "intersection" or "strings"'):
        LLM(target, speculation(draft, "none"), ENGINE)
    with pytest.raises(ValueError, match="needs the name of the target"):
        build_speculator(speculation(draft, "strings"), ENGINE, load(target, ENGINE).target_weights)


OURS, THEIRS = vocabulary(byte_level()), vocabulary(metaspace())
MAPPING = VocabularyMapping.between(OURS, THEIRS)


@pytest.mark.parametrize(
    "build",
    [
        lambda: model_draft(Reciter(OURS), 3),
        lambda: intersection_draft(Reciter(THEIRS), MAPPING, 3),
        lambda: RetokenizingSpeculator(model_draft(Reciter(THEIRS), 3), MAPPING),
    ],
    ids=["none", "intersection", "strings"],
)
def test_every_way_fits_the_books_of_a_target_that_speaks_words(build: Callable[[], Speculator]) -> None:
    """A byte-level and a sentencepiece tokenizer in one engine, with few slots and preemption."""
    config = SpeculativeConfig(method="draft_model", model="-", num_speculative_tokens=4, max_tree_nodes=12)
    asked = [
        GenerationRequest(
            str(i),
            OURS.tokenizer.encode(TALE[20 * i : 20 * i + 40]),
            SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=60),
        )
        for i in range(6)
    ]

    def tokens(drafts: DraftClient) -> list[list[int]]:
        model = Reciter(OURS, slots=256, sure=7.0)
        answers = run(Engine(model, EngineConfig(slots=256), config, drafts, FREE), asked)
        return [answers[request.request_id].tokens for request in asked]

    speculator = build()
    assert tokens(LocalDraftClient(speculator)) == tokens(NoDraftClient())
    speculator.check_integrity()  # type: ignore[attr-defined]
