"""`paceline train METHOD`: from text to a head that drafts, stopped and taken up again, and refused in one line."""

from __future__ import annotations

import json
import logging
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from paceline.config import SamplingParams
from paceline.drafting.auto_method import method_of_checkpoint
from paceline.llm import LLM
from paceline.model.checkpoint import Checkpoint
from paceline.text import Tokenizer
from paceline_lab.training.family.token_corpus import Ids, save_documents
from paceline_lab.training.family.trainer import Phase, Schedule
from paceline_lab.training.family.training_session import read_journal
from paceline_lab.training.heads import train_head
from paceline_lab.training.heads.target_reader import TargetReader
from paceline_lab.training.heads.text_files import TextError, divided, read_documents
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.head_checkpoints import save_target
from tests.helpers.llamas import VOCABULARY

ENOUGH = 1e-6
"""Minutes after which one step was made."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokens are numbers, without a chat template."""
    return save_checkpoint(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text(tmp_path_factory.mktemp("data") / "some.jsonl", documents=60)


def text(path: Path, documents: int, tokens: int = 300) -> Path:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(VOCABULARY, (documents, tokens), generator=generator).tolist()
    path.write_text("".join(json.dumps({"text": " ".join(map(str, row))}) + "\n" for row in rows))
    return path


def arguments(folder: Path, target: Path | str, data: Path, minutes: float = ENOUGH) -> list[str]:
    return [
        *("medusa", "--target", str(target), "--data", str(data), "--out", str(folder / "head")),
        *("--minutes", str(minutes), "--work-dir", str(folder / "work"), "--threads", "1"),
    ]


Train = Callable[..., int]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Train:
    """Trains in this process; returns the exit code."""

    def train(line: Sequence[str], *more: str) -> int:
        monkeypatch.setattr(sys, "argv", ["paceline train", *line, *more])
        return train_head.main()

    return train


def journal(folder: Path) -> list[dict[str, Any]]:
    return read_journal(folder / "work" / "medusa.jsonl")


@pytest.mark.slow
def test_a_command_makes_heads_that_draft(target: Path, data: Path, tmp_path: Path, train: Train) -> None:
    assert train(arguments(tmp_path, target, data, minutes=0.02)) == 0
    last = journal(tmp_path)[-1]
    assert (last["fraction"], last["threads"]) == (1, 1)
    assert 0 < last["held_out_loss"] < 2 * math.log(VOCABULARY)
    assert len(last["accepted_by_depth"]) == train_head.MEDUSA_HEADS
    assert method_of_checkpoint(Checkpoint(tmp_path / "head")) == "medusa"
    config = {"method": "medusa", "model": str(tmp_path / "head"), "draft_placement": "target"}
    llm = LLM(str(target), config, {"slots": 256})
    sampling = SamplingParams(temperature=0.0, max_tokens=12)
    [plain] = llm.generate([[3, 1, 4]], sampling, speculative=False)
    [drafted] = llm.generate([[3, 1, 4]], sampling)
    assert drafted.tokens == plain.tokens
    assert drafted.speculation.drafted_tokens > 0


def test_a_stopped_training_goes_on(
    target: Path, data: Path, tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second sitting finds its budget spent by the first one, and writes what that had learned."""
    calls, draft_loss = count(1), train_head.draft_loss

    def loss(*given: Any) -> Tensor:
        if next(calls) == 3:
            signal.raise_signal(signal.SIGTERM)
        return draft_loss(*given)

    with monkeypatch.context() as patched:
        patched.setattr(train_head, "draft_loss", loss)
        assert train(arguments(tmp_path, target, data, minutes=600)) == 128 + signal.SIGTERM
    assert not (tmp_path / "head").exists()
    assert not (tmp_path / "work" / "medusa.jsonl").exists()  # too few steps for a record
    assert train(arguments(tmp_path, target, data)) == 0
    assert [record["step"] for record in journal(tmp_path)] == [3]
    assert (tmp_path / "head" / "medusa_lm_head.safetensors").exists()


def test_a_training_starts_from_a_head(
    target: Path, data: Path, tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a rate of nothing, what comes out is what went in."""
    assert train(arguments(tmp_path / "first", target, data)) == 0
    monkeypatch.setattr(train_head, "SCHEDULE", replace(train_head.SCHEDULE, muon_rate=0.0, adam_rate=0.0))
    started = arguments(tmp_path / "started", target, data)
    assert train(started, "--start-from", str(tmp_path / "first" / "head")) == 0
    assert train(arguments(tmp_path / "afresh", target, data)) == 0
    first, started_from, afresh = (
        load_file(tmp_path / name / "head" / "medusa_lm_head.safetensors") for name in ("first", "started", "afresh")
    )
    assert first.keys() == started_from.keys()
    assert all(torch.equal(first[name], started_from[name]) for name in first)
    assert any(not torch.equal(first[name], afresh[name]) for name in first)


def test_text_may_be_shorter_than_the_rows_of_the_schedule(target: Path, tmp_path: Path, train: Train) -> None:
    """Including the last phase, which would fail when the budget is almost spent."""
    assert train(arguments(tmp_path, target, text(tmp_path / "short.jsonl", documents=2, tokens=200))) == 0
    last = journal(tmp_path)[-1]
    assert all(map(math.isfinite, [last["held_out_loss"], *last["accepted_by_depth"]]))
    schedule = Schedule((Phase(0.5, 4, 100), Phase(1.0, 1, 2048)), muon_rate=0.5)
    assert train_head.fitting(schedule, 511) == Schedule((Phase(0.5, 4, 100), Phase(1.0, 1, 511)), muon_rate=0.5)
    assert train_head.fitting(schedule, 9999, 2) == Schedule((Phase(0.5, 2, 100), Phase(1.0, 1, 2048)), muon_rate=0.5)


def test_a_head_of_frequent_tokens_keeps_them_when_the_text_grows(tmp_path: Path, train: Train) -> None:
    """The same command goes on with the tokens that it began with, and so does a training that starts from its head."""
    line = arguments(tmp_path, save_target(tmp_path / "target"), numbers(tmp_path / "grown.jsonl", range(10, 30)))
    line[0] = "eagle3"
    some = ("--draft-vocab-size", "20", "--share-output", "--intermediate-size", "32", "--batch-rows", "1")
    assert train(line, *some) == 0
    first = Checkpoint(tmp_path / "head")
    assert first.config["draft_vocab_size"] == 20
    assert first.config["intermediate_size"] == 32
    assert "lm_head.weight" not in first.names
    named = first.tensor("d2t") + torch.arange(20)
    assert named.tolist() == list(range(10, 30))
    assert first.tensor("t2d").nonzero()[:, 0].tolist() == named.tolist()
    numbers(tmp_path / "grown.jsonl", range(40, 70))
    assert train(line, *some) == 0
    assert torch.equal(Checkpoint(tmp_path / "head").tensor("d2t"), first.tensor("d2t"))
    again = arguments(tmp_path / "again", tmp_path / "target", tmp_path / "grown.jsonl")
    again[0] = "eagle3"
    assert train(again, *some, "--start-from", str(tmp_path / "head")) == 0
    assert torch.equal(Checkpoint(tmp_path / "again" / "head").tensor("d2t"), first.tensor("d2t"))


def numbers(path: Path, among: range) -> Path:
    """Two documents of these numbers: one to learn from, one to hold out."""
    line = json.dumps({"text": " ".join(map(str, [*among] * (300 // len(among))))})
    path.write_text(f"{line}\n{line}\n")
    return path


def test_held_out_files_are_not_learned_from(
    target: Path, data: Path, tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = list[int]()

    class Watched(train_head.TargetOutputCache):
        def __init__(self, reader: TargetReader, documents: Sequence[Ids], free_bytes: int) -> None:
            learned.append(len(documents))
            super().__init__(reader, documents, free_bytes)

    monkeypatch.setattr(train_head, "TargetOutputCache", Watched)
    held_out = text(tmp_path / "held.jsonl", 1)
    assert train(arguments(tmp_path, target, data), "--held-out", str(held_out)) == 0
    assert train(arguments(tmp_path / "other", target, data)) == 0
    assert learned == [60, 59]


# Refusals


def test_a_refusal_is_one_line_and_exit_code_2(data: Path, tmp_path: Path) -> None:
    line = arguments(tmp_path, tmp_path / "nowhere", data)
    program = "from paceline.cli import main; main()"
    argv = [sys.executable, "-c", program, "train", *line]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 2
    [refusal] = done.stderr.splitlines()
    assert f"no model at {tmp_path / 'nowhere'}" in refusal


def written(path: Path, content: str | bytes) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def large_vocabulary(folder: Path) -> str:
    save_documents(folder / "large.npz", [np.arange(VOCABULARY + 200, dtype=np.uint16)] * 3)
    return str(folder / "large.npz")


def another_head(folder: Path) -> str:
    save_file({"0.0.linear.weight": torch.zeros(3, 3)}, folder / "medusa_lm_head.safetensors")
    return str(folder)


def model_of(kind: str) -> Callable[[Path], str]:
    """A model's folder without weights."""
    return lambda folder: str(Path(written(folder / kind / "config.json", json.dumps({"model_type": kind}))).parent)


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("--data", lambda folder: written(folder / "bad.jsonl", '{"txt": "4"}\n'), "bad.jsonl, line 1: needs `text`"),
        ("--data", large_vocabulary, f"token {VOCABULARY + 199} is to learn from"),
        ("--data", lambda folder: str(folder / "none.txt"), "No such file"),
        ("--data", lambda folder: str(text(folder / "one.jsonl", 1)), "1 documents cannot be divided"),
        ("--data", lambda folder: str(text(folder / "few.jsonl", 2, 127)), "127 tokens are to learn from: give at"),
        ("--held-out", lambda folder: str(text(folder / "held.jsonl", 1, 100)), "100 tokens are held out"),
        ("--start-from", model_of("llama"), "start from a folder that `paceline train` wrote"),
        ("--start-from", another_head, "medusa_lm_head.safetensors has "),
        ("--start-from", lambda _: "pydoc-medusa", "family/pydoc-medusa/medusa_lm_head.safetensors has "),
        ("--target", lambda folder: "table:64", "has no weights"),
        ("--draft-vocab-size", lambda _: "8", "--draft-vocab-size is for eagle3 heads"),
        ("--target", model_of("llama"), "llama cannot be read"),
        ("--target", model_of("foreign"), "foreign cannot be read"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    target: Path,
    data: Path,
    tmp_path: Path,
    train: Train,
    option: str,
    value: Callable[[Path], str],
    complaint: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    line = arguments(tmp_path, target, data)
    if option in line:
        line[line.index(option) + 1] = value(tmp_path)
    else:
        line += [option, value(tmp_path)]
    assert train(line) == 2
    [record] = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert complaint in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "soon"])
def test_a_budget_is_some_time(minutes: str, tmp_path: Path, train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        train(arguments(tmp_path, "pydoc", tmp_path), f"--minutes={minutes}")
    assert exited.value.code == 2
    assert "--minutes" in capsys.readouterr().err.splitlines()[-1]


# Text files


END = 2
CHAT = [{"role": "user", "content": "What does len do?"}, {"role": "assistant", "content": "It counts."}]


def read(path: str | Path, model: str | Path) -> list[list[int]]:
    return [document.tolist() for document in read_documents([Path(path)], str(model), [END])]


@pytest.mark.parametrize(
    ("name", "content", "documents"),
    [
        ("a.jsonl", '{"text": "3 1 4"}\n{"prompt": "1 5", "completion": " 9"}\n', [[3, 1, 4, END], [1, 5, 9, END]]),
        ("a.jsonl", '\n{"text": "3"}\r\n  \n{"text": ""}\n\n', [[3, END], [END]]),
        ("a.jsonl", json.dumps({"messages": CHAT, "text": "7"}), [[7, END]]),  # without a template
        *((f"a.{suffix}", "3 1\n\n4\n", [[3, 1, 4, END]]) for suffix in ("txt", "md", "py")),
    ],
)
def test_a_line_of_json_or_a_file_is_a_document(
    target: Path, tmp_path: Path, name: str, content: str, documents: list[list[int]]
) -> None:
    assert read(written(tmp_path / name, content), target) == documents


def test_stored_ids_are_unchanged_and_files_are_read_in_order(target: Path, tmp_path: Path) -> None:
    save_documents(tmp_path / "b.npz", [np.array([3, 1, 4], dtype=np.uint16), np.array([1, 5], dtype=np.uint16)])
    (tmp_path / "a.txt").write_text("2 3")
    documents = read_documents([tmp_path / "b.npz", tmp_path / "a.txt"], str(target), [])
    assert [document.tolist() for document in documents] == [[3, 1, 4], [1, 5], [2, 3]]


def test_a_chat_is_rendered_with_the_template(tmp_path: Path) -> None:
    [ids] = read(written(tmp_path / "a.jsonl", json.dumps({"messages": CHAT, "text": "not this"})), "pydoc")
    shown = Tokenizer.load("pydoc").decode(ids[:-1], skip_special_tokens=False)
    assert shown.startswith("<|im_start|>user\nWhat does len do?<|im_end|>")
    assert shown.rstrip().endswith("It counts.<|im_end|>")
    assert ids[-1] == END


def test_text_is_utf_8_and_may_contain_other_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON allows them; `str.splitlines` would split there."""
    monkeypatch.setattr("locale.getpreferredencoding", lambda *_: "ascii")
    text = "Grüße\u2028b\x85c\x0bd"
    for name, content in (("a.txt", text), ("a.jsonl", json.dumps({"text": text}, ensure_ascii=False))):
        [ids] = read(written(tmp_path / name, content), "pydoc")
        assert Tokenizer.load("pydoc").decode(ids[:-1]) == text


def test_no_bos_is_added(tmp_path: Path) -> None:
    """Templates and prompts have their own BOS."""
    folder = save_checkpoint(tmp_path / "target")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single="9 $A", special_tokens=[("9", 9)])
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer.load(str(folder)).encode("3") == [9, 3]
    assert read(written(tmp_path / "a.txt", "3"), folder) == [[3, END]]


@pytest.mark.parametrize(
    ("model", "name", "content", "complaint"),
    [
        ("plain", "some.jsonl", b'{"text": "1"}\n\n{', "line 3: .*no JSON"),
        ("plain", "some.jsonl", b'{"txt": "1"}', "line 1: .*needs `text`"),
        ("plain", "some.jsonl", b'{"text": 3}', "line 1: .*needs `text`"),
        ("plain", "some.jsonl", b'{"prompt": "1"}', "line 1: .*needs `text`"),
        ("plain", "some.jsonl", b'["1"]', "line 1: .*needs `text`"),
        ("plain", "some.jsonl", json.dumps({"messages": CHAT}).encode(), "line 1: .*a chat template"),
        ("pydoc", "some.jsonl", b'{"messages": [1, {}]}', "line 1: the chat template refuses it"),
        ("plain", "some.csv", b"1", r"is in \.jsonl, \.npz, \.txt"),
        ("plain", "some.txt", b"\xff\xfe", "not UTF-8"),
        ("plain", "some.jsonl", b'{"text": "\xff"}', "not UTF-8"),
        ("plain", "some.npz", b"", "not what save_documents writes"),
        ("plain", "some.npz", b"PK\x03\x04 half", "not what save_documents writes"),
        ("plain", "some.npz", None, "not what save_documents writes"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    target: Path, tmp_path: Path, model: str, name: str, content: bytes | None, complaint: str
) -> None:
    if content is None:
        np.savez(tmp_path / name, tokens=np.arange(3))
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TextError, match=rf"^{tmp_path / name}[,:] .*{complaint}"):
        read(tmp_path / name, target if model == "plain" else model)


@pytest.mark.parametrize("number", [2, 3, 7, 49, 50, 75, 100, 1001, 3200])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6])
def test_every_document_is_for_training_or_held_out(number: int, share: float) -> None:
    kept, held_out = ([int(d[0]) for d in part] for part in divided([np.array([n]) for n in range(number)], share))
    assert (kept, held_out) == (sorted(kept), sorted(held_out)), "documents keep their order"
    assert sorted(kept + held_out) == list(range(number))
    assert 1 <= len(held_out) == min(64, max(1, round(share * number)))
    gaps = [later - earlier for earlier, later in pairwise(held_out)]
    assert not gaps or max(gaps) - min(gaps) <= 1  # of every part of the text
