"""The family that ships with the package, the script that trained it, and its model cards."""

from __future__ import annotations

import ast
import copy
import io
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlamaForCausalLM

from paceline import family
from paceline.drafting.auto_method import has_mtp_layer, method_of_checkpoint, mtp_layer_names
from paceline.model.checkpoint import Checkpoint
from paceline_lab.training import train_family
from paceline_lab.training.family import family_evaluation, stdlib_corpus, training_session
from paceline_lab.training.family.distillation import DistillationData, target_top_probs
from paceline_lab.training.family.docstring_chats import CALL_QUESTIONS, QUESTIONS, chats, questions
from paceline_lab.training.family.docstrings import first_paragraph
from paceline_lab.training.family.family_models import (
    deepened,
    draft_config,
    logits,
    new_model,
    next_token_loss,
    shallow_config,
    target_config,
)
from paceline_lab.training.family.family_tokenizer import END_OF_TEXT, SPECIAL, TURN_END, load_tokenizer
from paceline_lab.training.family.hybrid_model import hybrid_config
from paceline_lab.training.family.model_card import TrainingRecord, draft_card, head_card, hybrid_card, target_card
from paceline_lab.training.family.target_text import ANSWER, question_responses
from paceline_lab.training.family.token_corpus import (
    Ids,
    corpus_stream,
    encode_documents,
    load_documents,
    save_documents,
    windows,
)
from paceline_lab.training.family.trainer import Phase, Schedule, Trainer
from paceline_lab.training.family.training_session import held_out_loss_of, read_journal, train
from paceline_lab.training.family.workspace import Workspace

MICRO = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
SHORT = MICRO | {"num_hidden_layers": 2, "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(family.path("pydoc"))


@pytest.fixture(scope="module")
def plain_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(family.path("pydoc") / "tokenizer.json"))


@pytest.fixture(scope="module")
def documents(tokenizer: Any) -> list[Ids]:
    return encode_documents(tokenizer, [stdlib_corpus.read_source(path) for path in stdlib_corpus.source_files()[:8]])


def micro_trainer(documents: list[Ids], clock: Callable[[], float] = lambda: 0.0) -> Trainer[LlamaForCausalLM]:
    """A model of a few thousand weights; without a clock it stays at the start of its budget."""
    schedule = Schedule((Phase(0.5, 4, 16), Phase(1.0, 2, 32)), warmup=1e-4)
    model = new_model(target_config(**SHORT), seed=0)
    return Trainer(model, corpus_stream(documents, seed=0), next_token_loss, schedule, 20.0, clock)


# Corpus


def test_held_out_files_exist_and_are_not_read() -> None:
    held_out = stdlib_corpus.held_out_files()
    assert all(path.is_file() for path in held_out)
    assert len(set(held_out)) == 12
    assert set(held_out).isdisjoint(stdlib_corpus.source_files())


def test_tests_and_foreign_packages_are_not_read() -> None:
    parts = {part for path in stdlib_corpus.source_files() for part in path.relative_to(stdlib_corpus.stdlib()).parts}
    assert parts.isdisjoint({"test", "site-packages", "idlelib", "antigravity.py", "this.py"})


@pytest.mark.slow
def test_chats_know_public_names_and_nothing_that_was_held_out() -> None:
    conversations = chats()
    known = {chat[0]["content"]: chat[1]["content"] for chat in conversations}
    assert known["What does len do?"] == "`len(obj, /)`\n\nReturn the number of items in a container."
    assert known["What does json.dumps do?"].endswith("Serialize ``obj`` to a JSON formatted ``str``.")
    assert known["What does asyncio.gather do?"].startswith("`asyncio.gather(")
    assert known["What does os.path.join do?"].startswith("`os.path.join(")
    held_out = stdlib_corpus.held_out_files()
    modules = "|".join(path.stem for path in held_out)
    about = re.compile(rf"(What does|Explain|How do I call) `?({modules})\b")
    assert not [chat for chat in conversations if about.match(chat[-2]["content"])]
    text = "\n".join(message["content"] for chat in conversations for message in chat)
    summaries = [first_paragraph(ast.get_docstring(ast.parse(stdlib_corpus.read_source(path)))) for path in held_out]
    assert not [summary for summary in summaries if summary and summary in text]

    def names(asked: str) -> set[str]:
        return {part.strip("?.`") for part in asked.split()} - common

    common = {part.strip("?.`") for asked in (*QUESTIONS, *CALL_QUESTIONS) for part in asked.split()}
    public = {name for chat in conversations for name in names(chat[-2]["content"])}
    invented = [not names(chat[0]["content"]) <= public for chat in questions(60, seed=0)]
    assert sum(invented[1::2]) == 0, "every other question is about an invented name"
    assert sum(invented[0::2]) > 20


# Tokenizer


@given(st.text())
def test_text_survives_the_tokenizer(plain_tokenizer: Tokenizer, text: str) -> None:
    ids = plain_tokenizer.encode(text, add_special_tokens=False).ids
    assert plain_tokenizer.decode(ids, skip_special_tokens=False) == text


def test_targets_and_draft_share_a_tokenizer() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        contents = {(family.path(model) / name).read_bytes() for model in (*family.NAMES, family.HYBRID)}
        assert len(contents) == 1


def test_special_ids_are_those_of_the_model(tokenizer: Any) -> None:
    ends = GenerationConfig.from_pretrained(family.path("pydoc")).eos_token_id
    assert ends == tokenizer.convert_tokens_to_ids([TURN_END, END_OF_TEXT])
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == [0, 1, 2]
    assert tokenizer.eos_token == TURN_END
    assert len(tokenizer) == AutoConfig.from_pretrained(family.path("pydoc")).vocab_size


# Batches


def test_an_epoch_predicts_every_token_once(documents: list[Ids]) -> None:
    rows = windows(documents, 64, seed=3)
    total = sum(map(len, documents))
    assert total - 64 <= rows[:, 1:].numel() + 1 <= total
    assert not torch.equal(rows, windows(documents, 64, seed=4))


# Training


def test_steps_lower_the_loss(documents: list[Ids]) -> None:
    trainer = micro_trainer(documents)
    losses = [trainer.step() for _ in range(30)]
    assert losses[-1] < losses[0] - 0.5


def test_a_resumed_run_is_bit_exact(documents: list[Ids], tmp_path: Path) -> None:
    """Through a change of length and the fall of the learning rate; every reading of the clock is 1 s later."""
    whole = micro_trainer(documents, count().__next__)
    for _ in range(7):
        whole.step()
    whole.save(tmp_path / "checkpoint.pt")
    resumed = micro_trainer(documents, count(100).__next__)
    resumed.load(tmp_path / "checkpoint.pt")
    for _ in range(8):
        assert whole.step() == resumed.step()
    assert whole.progress == resumed.progress
    assert whole.progress.position.length == 32
    assert all(torch.equal(p, resumed.masters[name]) for name, p in whole.masters.items())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stderr", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_a_session_shows_a_bar_on_a_terminal_only(
    documents: list[Ids],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    stderr: io.StringIO,
) -> None:
    """Every step is recorded, and takes 1 s."""
    caplog.set_level(logging.INFO, training_session.__name__)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(training_session, "STEPS_PER_RECORD", 1)
    for name, value in {"COLUMNS": "120", "TERM": "xterm", "FORCE_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    handler = logging.StreamHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    trainer = micro_trainer(documents, count().__next__)
    train(trainer, tmp_path / "micro", held_out_loss_of(trainer.model, documents[:1]))
    assert handler.stream is sys.stderr is stderr
    journal = read_journal(tmp_path / "micro.jsonl")
    steps, last = [record for record in journal if "loss" in record], journal[-1]
    assert last["fraction"] == 1, "it ends with its budget"
    assert 0 < last["held_out_loss"] < 9
    if not stderr.isatty():
        assert stderr.getvalue().splitlines() == [str(record) for record in journal]
        return
    end = f"loss {steps[-1]['loss']:.3f} · {last['tokens'] / last['seconds']:,.0f} tokens/s · 0:00:00 left"
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]+", stderr.getvalue())]
    assert any(line.startswith("micro ") and "100%" in line and line.rstrip().endswith(end) for line in lines)
    assert sum(line.startswith("{'step'") for line in lines) == len(journal), "a record was written into the bar"


def test_training_attention_is_plain_causal_attention() -> None:
    ours = new_model(target_config(**SHORT), seed=1)
    theirs = copy.deepcopy(ours)
    theirs.set_attn_implementation("sdpa")
    ids = torch.randint(4096, (2, 40), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(logits(ours, ids), logits(theirs, ids), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layers", [2, 3, 5])
def test_a_deepened_model_has_the_same_logits(layers: int) -> None:
    shallow, deeper = target_config(**SHORT), target_config(**SHORT | {"num_hidden_layers": layers})
    model = new_model(shallow, seed=4)
    ids = torch.randint(4096, (2, 40), generator=torch.Generator().manual_seed(0))
    deep = deepened(model, deeper)
    assert len(deep.model.layers) == layers
    torch.testing.assert_close(logits(deep, ids), logits(model, ids))


def test_an_answer_ends_with_its_turn(tokenizer: Any) -> None:
    model = new_model(draft_config(**SHORT | {"max_position_embeddings": 256}), seed=5)
    model.set_attn_implementation("sdpa")
    end_of_text, turn_end = tokenizer.convert_tokens_to_ids([END_OF_TEXT, TURN_END])
    model.model.embed_tokens.weight.data[turn_end] *= 4  # frequent enough to end some answers early
    asked = questions(12, seed=1)
    documents = question_responses(model, tokenizer, asked, seed=0)
    assert len(documents) == len(asked)
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in asked]
    for document in documents:
        prompt = next(ids for ids in prompts if document[: len(ids)].tolist() == ids)
        answer = document[len(prompt) : -1].tolist()
        assert document[-1] == end_of_text
        assert turn_end not in answer[:-1]
        assert len(answer) == ANSWER or answer[-1] == turn_end


def test_divergence_from_itself_is_zero() -> None:
    model = new_model(target_config(**SHORT), seed=2)
    other = new_model(target_config(**SHORT), seed=3)
    lessons = target_top_probs(model, torch.arange(96).view(4, 24))
    rows = lessons.stream(seed=0).batch(4, 24)
    with torch.no_grad():
        own, foreign = lessons.divergence(model, rows), lessons.divergence(other, rows)
    assert float(own) == pytest.approx(0, abs=1e-4)
    assert float(foreign) > 10 * abs(float(own))


# Evaluation


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("\n    return x\n\n\ndef g():\n", "parsed"),
        ("\n    y = x +\n    return y\n    z", "broken"),
        ("\n    for y in x:\n        print(y", "unfinished"),
        ('\n    """Say', "unfinished"),
        ("\n    try:\n        y = 1\n    except E:\n        y = 2\n    return y\n", "parsed"),
        ("\n    try:\n        y = 1\n    return y\n    x", "broken"),
        ("\n    y = (1,\n  2)\n    return\n", "parsed"),
        ("\n      y = 1\n   z = 2\n    return", "broken"),
        (" return x", "unfinished"),
    ],
)
def test_verdicts(completion: str, expected: str) -> None:
    assert family_evaluation.verdict("def f(x):", completion) == expected
    indented = completion.replace("\n", "\n    ").replace("\n    def", "\ndef")
    assert family_evaluation.verdict("    def f(x):", indented) == expected


# What ships


def test_the_family_is_small_enough_to_ship_and_its_card_names_what_was_held_out() -> None:
    """So are heads for others' models, each by itself."""

    def size(name: str) -> int:
        return sum(path.stat().st_size for path in family.path(name).rglob("*") if path.is_file())

    assert sum(map(size, (*family.NAMES, *family.HEADS.values()))) < 60e6
    assert (family.path(family.HYBRID) / "model.safetensors").stat().st_size < 5e6
    assert max(map(size, family.PUBLISHED_HEADS.values())) < 12e6
    card = (family.path("pydoc") / "README.md").read_text()
    assert all(f"`{name}`" in card for name in stdlib_corpus.HELD_OUT)


def test_names_resolve_and_others_are_refused() -> None:
    assert all((family.path(name) / "config.json").is_file() for name in family.NAMES)
    with pytest.raises(KeyError, match="pydoc-draft"):
        family.path("gpt")


def test_the_family_is_found_without_torch() -> None:
    code = "import sys, paceline.family; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# The script


ENOUGH = 1e-9
"""Minutes: a budget of one step."""


@pytest.fixture
def space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A small family: two layers at first, then three, and little to read."""
    monkeypatch.setattr(train_family, "shallow_config", lambda: target_config(**MICRO, num_hidden_layers=2))
    monkeypatch.setattr(train_family, "target_config", lambda: target_config(**MICRO, num_hidden_layers=3))
    monkeypatch.setattr(train_family, "draft_config", lambda: draft_config(**MICRO))
    small = hybrid_config(hidden_size=MICRO["hidden_size"], num_hidden_layers=4)
    monkeypatch.setattr(train_family, "hybrid_config", lambda: small)
    texts = [stdlib_corpus.read_source(path) for path in stdlib_corpus.source_files()[:30]]
    monkeypatch.setattr(train_family, "source_texts", lambda: texts)
    for name, size in (("EDITS", 12), ("EXTRACTIONS", 5), ("READ", 5000), ("PART", 400)):
        monkeypatch.setattr(train_family, name, size)
    made = Workspace(tmp_path, tmp_path / "out", "cpu", ENOUGH, 4)
    tokenizer = load_tokenizer(family.path("pydoc"))
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


@pytest.mark.slow
def test_the_draft_and_every_head_read_the_same_lessons(space: Workspace) -> None:
    space = replace(space, lesson_rows=8)
    for stage in ("shallow", "deep", "target", "draft", "heads"):
        train_family.COMMANDS[stage](space)
    lessons = DistillationData.load(space.lessons_file).ids_RL
    read = load_documents(space.read_file)
    assert [row.tolist() for row in read] == lessons.tolist()
    for method, name in family.HEADS.items():
        assert read_journal(space.folder / f"{method}.jsonl")[-1]["fraction"] == 1
        assert method_of_checkpoint(Checkpoint(space.out / name)) == method


@pytest.mark.slow
def test_the_hybrid_reads_the_same_lessons_and_its_layer_ships_with_it(space: Workspace) -> None:
    space = replace(space, lesson_rows=8)
    for stage in ("shallow", "deep", "target", "hybrid"):
        train_family.COMMANDS[stage](space)
    assert has_mtp_layer(str(space.hybrid_folder))
    made, shipped = (
        mtp_layer_names(Checkpoint(folder)) for folder in (space.hybrid_folder, family.path(family.HYBRID))
    )
    assert sorted(made) == sorted(shipped)
    card = (space.hybrid_folder / "README.md").read_text()
    assert "train_family hybrid" in card
    assert f"{DistillationData.load(space.lessons_file).ids_RL.numel():,} tokens" in card


def test_all_minutes_are_shared_out() -> None:
    assert sum(train_family.HYBRID_SHARES.values()) == pytest.approx(1.0)
    assert sum(train_family.SHARES.values()) == pytest.approx(1.0)
    assert sum(train_family.HEAD_SHARES.values()) == pytest.approx(1.0)


FIRST = TrainingRecord(10, 1000, 60.0, 3.0, (1, 2))
SECOND = TrainingRecord(5, 500, 30.0, 2.5, (2,))
THIRD = TrainingRecord(1, 70, 90.0, 2.25, (4,))
MEASURED = {
    "parsing": {"0.0": {"parsed": 3, "broken": 1, "unfinished": 0}},
    "answers": {"What is len?": "Of\n\nthings."},
    "agreement": {"held-out files": 0.875},
    **{"corpus_tokens": 12345, "lesson_tokens": 678, "target_parameters": 1_000_000, "draft_parameters": 2000},
    **{"target_step_ms": 1.25, "draft_step_ms": 0.75, "minutes": 120.4},
}
STEPS = [{"step": n, "tokens": 10 * n, "seconds": 60.0 * n, "threads": 3 - n} for n in (1, 2)]
JOURNAL = [
    STEPS[0] | {"held_out_loss": 9.0, "accepted_by_depth": [0.1, 0.0]},
    STEPS[0] | {"loss": 5.0},
    STEPS[1] | {"held_out_loss": 2.5, "accepted_by_depth": [0.6, 0.4]},
]


def test_a_continued_training_adds_up() -> None:
    assert TrainingRecord.from_journal(JOURNAL) == TrainingRecord(2, 20, 120.0, 2.5, (1, 2))
    assert SECOND.after(FIRST) == TrainingRecord(15, 1500, 90.0, 2.5, (1, 2))
    assert THIRD.after(SECOND.after(FIRST)) == TrainingRecord(16, 1570, 180.0, 2.25, (1, 2, 4))


def test_cards_have_the_figures_of_the_training() -> None:
    target = target_card(target_config(), shallow_config(), (FIRST, SECOND, THIRD), MEASURED)
    for figure in ("1,570", "16", "3 minutes", "1 to 4 threads", "2.250", "| 75% | 25% | 0% |", "> Of\n>\n> things."):
        assert figure in target
    draft = draft_card(draft_config(), SECOND, MEASURED)
    for figure in ("| held-out files | 87.5% |", "678 tokens", "500 in 5 steps", "0.8 ms against the target's 1.2 ms"):
        assert figure in draft
    hybrid = hybrid_card(hybrid_config(), JOURNAL[:1], JOURNAL, MEASURED | {"parameters": 4321})
    for figure in (
        "4,321",
        "6 of gated delta rule with 4 states of 32 x 32, 2 of attention",
        "10 in 1 steps",
        "1 minutes, and 2 of the layer",
        "9.000 nats per token; `mtp`: 2.500",
        "60%, 40%",
        "> Of\n>\n> things.",
        "train_family hybrid --minutes 3",
    ):
        assert figure in hybrid
    head = head_card("eagle", "pydoc-eagle", 4321, JOURNAL, MEASURED)
    for figure in (
        "# pydoc-eagle",
        "4,321",
        "678 tokens of lessons",
        "20 in 2 steps",
        "2 minutes",
        "2.500",
        "60%, 40%",
    ):
        assert figure in head
