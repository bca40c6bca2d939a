"""The same tokens with a draft of another vocabulary, in one process and over the wire."""

from __future__ import annotations

import random

import pytest

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.llm import LLM, VocabularyMismatchError
from paceline.model import load
from paceline.speculators import Speculator, build
from paceline.speculators.draft_model import DraftModel
from paceline.speculators.intersection import IntersectionDraft
from paceline.speculators.strings import StringDraft
from paceline.speculators.vocabularies import VocabularyMapping
from tests.exactness.test_wire import both, run, served
from tests.exactness.test_wire import requests as wire_requests
from tests.foreign import TALE, Reciter, byte_level, metaspace, numbered, permuted_llama, save, vocabulary
from tests.llamas import VOCABULARY, peaked_llama

NUMBERS = random.Random(3).sample(range(VOCABULARY), VOCABULARY)
KINDS = {"none": DraftModel, "intersection": IntersectionDraft, "strings": StringDraft}
ENGINE = EngineConfig(slots=2048)


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
            "draft_schedule": "lockstep",  # so that no guess hangs on how fast this machine is
            "row_budget": False,
        }
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mapping", ["intersection", "strings"])
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


@pytest.mark.parametrize("mapping", ["none", "intersection", "strings"])
def test_a_draft_of_the_targets_own_vocabulary_is_not_mapped(target: str, mapping: str) -> None:
    model = load(target, ENGINE)
    assert type(build(speculation(target, mapping), ENGINE, model.lend, target)) is DraftModel


@pytest.mark.parametrize("mapping", KINDS)
def test_the_configuration_names_the_way(target: str, draft: str, mapping: str) -> None:
    model = load(target, ENGINE)
    built = build(speculation(draft, mapping), ENGINE, model.lend, target)
    assert type(built) is KINDS[mapping]
    assert (built.vocabulary_fingerprint == model.fingerprint) is (mapping != "none")


def test_without_a_mapping_it_is_refused(target: str, draft: str) -> None:
    with pytest.raises(VocabularyMismatchError, match='"vocabulary_mapping" to "intersection" or "strings"'):
        LLM(target, speculation(draft, "none"), ENGINE)


def test_without_the_targets_name_there_is_no_mapping(target: str, draft: str) -> None:
    with pytest.raises(ValueError, match="needs the name of the target"):
        build(speculation(draft, "strings"), ENGINE, load(target, ENGINE).lend)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mapping", ["intersection", "strings"])
async def test_over_the_wire_too(target: str, draft: str, mapping: str, temperature: float) -> None:
    """The target waits for the draft, so that there are guesses however fast it is."""
    model, config = load(target, ENGINE), speculation(draft, mapping, width=1)
    config = config.model_copy(update={"draft_schedule": "lockstep", "least_path_probability": 0.0})
    async with served(model, config, build(config, ENGINE, model.lend, target)) as (link, drafts):
        alone, _ = await run(link, wire_requests(temperature, plain=True))
        (mixed, plain), stats = await both(link, temperature, drafts)
        assert mixed == plain == alone
        assert sum(each.drafted_tokens for each in stats) > 0
        assert sum(each.accepted_tokens for each in stats) > 0


@pytest.mark.parametrize("draft", [DraftModel, IntersectionDraft, StringDraft])
def test_every_way_fits_the_books_of_a_target_that_speaks_words(draft: type[Speculator]) -> None:
    """Byte-level words against a sentencepiece's, in one engine with preemption: slots are few."""
    from tests.exactness.test_engine import FREE, LocalDrafting, NoDrafting, Submission
    from tests.exactness.test_engine import Engine as TargetEngine
    from tests.exactness.test_engine import run as serve

    ours, theirs = vocabulary(byte_level()), vocabulary(metaspace())
    mapping = VocabularyMapping.between(ours, theirs)
    if draft is DraftModel:
        speculator: Speculator = DraftModel(Reciter(ours), 3)
    elif draft is IntersectionDraft:
        speculator = IntersectionDraft(Reciter(theirs), mapping, 3)
    else:
        speculator = StringDraft(DraftModel(Reciter(theirs), 3), mapping)
    prompts = [ours.tokenizer.encode(TALE[at : at + 40]) for at in range(0, 120, 20)]
    sampling = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=60) for i in range(len(prompts))]
    asked = [Submission(str(i), each, how) for i, (each, how) in enumerate(zip(prompts, sampling, strict=True))]
    config = SpeculativeConfig(method="draft_model", model="-", num_speculative_tokens=4, max_tree_nodes=12)
    small = EngineConfig(slots=256)
    plain = serve(TargetEngine(Reciter(ours, slots=256, sure=7.0), small, config, NoDrafting(), FREE), asked)
    drafted = serve(
        TargetEngine(Reciter(ours, slots=256, sure=7.0), small, config, LocalDrafting(speculator), FREE), asked
    )
    assert {key: answer.tokens for key, answer in drafted.items()} == {
        key: answer.tokens for key, answer in plain.items()
    }
    speculator.check_integrity()  # type: ignore[attr-defined]
