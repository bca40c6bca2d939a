"""The script that makes the shipped family: its stages, and the model cards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline import family as shipped
from paceline.drafting.checkpoint_detection import method_of_checkpoint
from paceline.model.checkpoint import Checkpoint
from paceline_lab.training import train_family
from paceline_lab.training.family import stdlib_corpus
from paceline_lab.training.family.distillation import DistillationData
from paceline_lab.training.family.family_evaluation import stored_parameters
from paceline_lab.training.family.family_models import draft_config, logits, shallow_config, target_config
from paceline_lab.training.family.family_tokenizer import load_tokenizer
from paceline_lab.training.family.model_card import TrainingRecord, draft_card, head_card, target_card
from paceline_lab.training.family.token_corpus import encode_documents, load_documents, save_documents
from paceline_lab.training.family.training_session import read_journal
from paceline_lab.training.family.workspace import Workspace

ENOUGH = 1e-9
"""Minutes: a budget of one step."""


@pytest.fixture
def space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A small family: two layers at first, then three, and little to read."""
    micro = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    monkeypatch.setattr(train_family, "shallow_config", lambda: target_config(**micro, num_hidden_layers=2))
    monkeypatch.setattr(train_family, "target_config", lambda: target_config(**micro, num_hidden_layers=3))
    monkeypatch.setattr(train_family, "draft_config", lambda: draft_config(**micro))
    texts = [stdlib_corpus.read_source(path) for path in stdlib_corpus.source_files()[:30]]
    monkeypatch.setattr(train_family, "source_texts", lambda: texts)
    for name, count in (("EDITS", 12), ("EXTRACTIONS", 5), ("READ", 5000), ("PART", 400)):
        monkeypatch.setattr(train_family, name, count)
    made = Workspace(tmp_path, tmp_path / "out", "cpu", ENOUGH, 4)
    tokenizer = load_tokenizer(shipped.path("pydoc"))
    tokenizer.save_pretrained(made.tokenizer_folder)
    save_documents(made.corpus_file, encode_documents(tokenizer, texts))
    save_documents(
        made.held_out_file, encode_documents(tokenizer, [stdlib_corpus.read_source(stdlib_corpus.held_out_files()[0])])
    )
    return made


@torch.no_grad()
def test_each_stage_continues_the_stage_before(space: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step each, at a learning rate of zero: the logits stay the same."""
    ids = torch.arange(40)[None]
    for name in ("SHALLOW_SCHEDULE", "DEEP_SCHEDULE", "TAUGHT_SCHEDULE"):
        still = train_family.Schedule((train_family.Phase(1.0, 1, 64),), muon_rate=0.0, adam_rate=0.0)
        monkeypatch.setattr(train_family, name, still)
    with torch.enable_grad():
        for stage in ("shallow", "deep", "target"):
            train_family.COMMANDS[stage](space)
    outputs = [logits(model, ids) for model in (space.shallow(), space.deep(), space.target())]
    assert [len(m.model.layers) for m in (space.shallow(), space.deep(), space.target())] == [2, 3, 3]
    for each in outputs[1:]:
        torch.testing.assert_close(each, outputs[0], rtol=0.02, atol=0.02)
    for stage in ("shallow", "deep", "target"):
        assert read_journal(space.folder / f"{stage}.jsonl")[-1]["fraction"] == 1


def test_a_stage_that_has_spent_its_budget_only_writes(space: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_family, "SHALLOW_SCHEDULE", train_family.Schedule((train_family.Phase(1.0, 1, 64),)))
    for _ in range(2):
        train_family.train_shallow(space)
    assert [record["step"] for record in read_journal(space.folder / "shallow.jsonl")] == [1, 1]


@pytest.mark.slow
def test_the_last_training_text_is_copies_and_some_of_everything_else(space: Workspace) -> None:
    taught, copies = train_family._taught(space), train_family._copies(space)
    assert len(copies) == 12 + 5
    assert [ids.tolist() for ids in taught[:17]] == [ids.tolist() for ids in copies]
    others = taught[17:]
    begins = {tuple(ids[:400].tolist()) for ids in space.corpus()}
    assert all(tuple(ids.tolist()) in begins for ids in others)
    assert len({tuple(ids.tolist()) for ids in others}) == len(others)
    assert 5000 <= sum(map(len, others)) < 5400
    assert [ids.tolist() for ids in train_family._taught(space)] == [ids.tolist() for ids in taught]


@pytest.mark.slow
def test_the_draft_and_every_head_read_the_same_lessons(space: Workspace) -> None:
    space = replace(space, lesson_rows=8)
    for stage in ("shallow", "deep", "target", "draft", "heads"):
        train_family.COMMANDS[stage](space)
    lessons = DistillationData.load(space.lessons_file).ids_RL
    read = load_documents(space.read_file)
    assert [row.tolist() for row in read] == lessons.tolist()
    for method, name in shipped.HEADS.items():
        assert read_journal(space.folder / f"{method}.jsonl")[-1]["fraction"] == 1
        assert stored_parameters(space.out / name) > 0
        assert method_of_checkpoint(Checkpoint(space.out / name)) == method


def test_all_minutes_are_shared_out() -> None:
    assert sum(train_family.SHARES.values()) == pytest.approx(1.0)
    assert list(train_family.SHARES) == ["shallow", "deep", "target", "draft", "heads"]
    assert set(train_family.SHARES) < set(train_family.COMMANDS)
    assert sum(train_family.HEAD_SHARES.values()) == pytest.approx(1.0)
    assert train_family.HEAD_SHARES.keys() == shipped.HEADS.keys()


FIRST = TrainingRecord(10, 1000, 60.0, 3.0, (1, 2))
SECOND = TrainingRecord(5, 500, 30.0, 2.5, (2,))
THIRD = TrainingRecord(1, 70, 90.0, 2.25, (4,))
MEASURED = {
    "parsing": {"0.0": {"parsed": 3, "broken": 1, "unfinished": 0}},
    "answers": {"What is len?": "Of\n\nthings."},
    "agreement": {"held-out files": 0.875},
    "corpus_tokens": 12345,
    "lesson_tokens": 678,
    "target_parameters": 1_000_000,
    "draft_parameters": 2000,
    "target_step_ms": 1.25,
    "draft_step_ms": 0.75,
    "minutes": 120.4,
}


def test_a_continued_training_adds_up() -> None:
    assert SECOND.after(FIRST) == TrainingRecord(15, 1500, 90.0, 2.5, (1, 2))
    assert THIRD.after(SECOND.after(FIRST)) == TrainingRecord(16, 1570, 180.0, 2.25, (1, 2, 4))


def test_a_journal_s_last_record_counts() -> None:
    records = [
        {"step": 1, "tokens": 10, "seconds": 1.0, "threads": 2, "held_out_loss": 9.0},
        {"step": 2, "tokens": 20, "seconds": 2.0, "threads": 1, "held_out_loss": 4.0},
        {"step": 3, "tokens": 30, "seconds": 3.0, "threads": 1, "loss": 1.0},
    ]
    assert TrainingRecord.from_journal(records) == TrainingRecord(3, 30, 3.0, 4.0, (1, 2))


def test_the_target_s_card() -> None:
    card = target_card(target_config(), shallow_config(), (FIRST, SECOND, THIRD), MEASURED)
    for expected in ("1,570", "1,000", "70", "16", "3 minutes", "1 to 4 threads", "2.250", "| 75% | 25% | 0% |"):
        assert expected in card, expected
    assert "> Of\n>\n> things." in card
    assert "--minutes 120 " in card


def test_the_draft_s_card() -> None:
    card = draft_card(draft_config(), SECOND, MEASURED)
    for expected in (
        "| held-out files | 87.5% |",
        "678 tokens",
        "500 in 5 steps",
        "0.8 ms against the target's 1.2 ms",
    ):
        assert expected in card, expected


def test_a_head_s_card() -> None:
    spent = [{"step": n, "tokens": 10 * n, "seconds": 60.0 * n, "threads": 1} for n in (1, 2, 3)]
    figures_of_steps = (
        {"held_out_loss": 9.0, "accepted_by_depth": [0.1, 0.0]},
        {"loss": 5.0},
        {"held_out_loss": 2.5, "accepted_by_depth": [0.6, 0.4]},
    )
    journal = [{**each, **figures} for each, figures in zip(spent, figures_of_steps, strict=True)]
    card = head_card("eagle", "pydoc-eagle", 4321, journal, MEASURED)
    for expected in (
        "# pydoc-eagle",
        "4,321",
        "678 tokens of lessons",
        "30 in 3 steps",
        "3 minutes",
        "2.500",
        "60%, 40%",
    ):
        assert expected in card, expected
