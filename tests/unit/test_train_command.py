"""`paceline train METHOD`: from text to a head that drafts, stopped and taken up again, and refused in one line."""

from __future__ import annotations

import json
import logging
import math
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.config import SamplingParams
from paceline.drafting.checkpoint_detection import method_of_checkpoint
from paceline.llm import LLM
from paceline.model.checkpoint import Checkpoint
from paceline_lab.training.family.token_corpus import Ids, save_documents
from paceline_lab.training.family.trainer import Phase, Schedule
from paceline_lab.training.family.training_session import read_journal
from paceline_lab.training.heads import train_head
from paceline_lab.training.heads.target_reader import TargetReader
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.llamas import POSITIONS, VOCABULARY

PROGRAM = "from paceline.cli import main; main()"
ENOUGH = 1e-6
"""Minutes after which one step was made."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text(tmp_path_factory.mktemp("data") / "some.jsonl", documents=60)


def text(path: Path, documents: int, tokens: int = 300) -> Path:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(VOCABULARY, (documents, tokens), generator=generator).tolist()
    path.write_text("".join(json.dumps({"text": " ".join(map(str, row))}) + "\n" for row in rows))
    return path


def arguments(folder: Path, target: Path | str, *data: Path, minutes: float = ENOUGH) -> list[str]:
    return [
        *("medusa", "--target", str(target), "--data", *map(str, data), "--out", str(folder / "head")),
        *("--minutes", str(minutes), "--work-dir", str(folder / "work"), "--threads", "1"),
    ]


def trained(monkeypatch: pytest.MonkeyPatch, line: Sequence[str]) -> int:
    """In this process; the exit code."""
    monkeypatch.setattr(sys, "argv", ["paceline train", *line])
    return train_head.main()


def command(line: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, "train", *line], capture_output=True, text=True, check=False, timeout=200
    )


def journal(folder: Path) -> list[dict[str, Any]]:
    return read_journal(folder / "work" / "medusa.jsonl")


@pytest.mark.slow
def test_a_command_makes_heads_that_draft(target: Path, data: Path, tmp_path: Path) -> None:
    done = command(arguments(tmp_path, target, data, minutes=0.02))
    assert done.returncode == 0, done.stderr
    last = journal(tmp_path)[-1]
    assert last["fraction"] == 1
    assert last["threads"] == 1
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


def test_what_is_stopped_goes_on(target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second sitting finds its budget spent by the first one, and writes what that had learned."""
    calls = count(1)

    def loss(*given: Any) -> Tensor:
        if next(calls) == 3:
            signal.raise_signal(signal.SIGTERM)
        return draft_loss(*given)

    draft_loss = train_head.draft_loss
    with monkeypatch.context() as patched:
        patched.setattr(train_head, "draft_loss", loss)
        assert trained(monkeypatch, arguments(tmp_path, target, data, minutes=600)) == 128 + signal.SIGTERM
    assert not (tmp_path / "head").exists()
    assert not (tmp_path / "work" / "medusa.jsonl").exists()  # too few steps for a record
    assert trained(monkeypatch, arguments(tmp_path, target, data)) == 0
    assert [record["step"] for record in journal(tmp_path)] == [3]
    assert (tmp_path / "head" / "medusa_lm_head.safetensors").exists()


def test_a_head_can_be_gone_on_with(target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a rate of nothing, what comes out is what went in."""
    assert trained(monkeypatch, arguments(tmp_path / "first", target, data)) == 0
    first = tmp_path / "first" / "head"
    monkeypatch.setattr(train_head, "SCHEDULE", replace(train_head.SCHEDULE, muon_rate=0.0, adam_rate=0.0))
    line = [*arguments(tmp_path / "second", target, data), "--start-from", str(first)]
    assert trained(monkeypatch, line) == 0
    assert trained(monkeypatch, arguments(tmp_path / "afresh", target, data)) == 0
    stored, gone_on, afresh = (
        load_file(tmp_path / name / "head" / "medusa_lm_head.safetensors") for name in ("first", "second", "afresh")
    )
    assert stored.keys() == gone_on.keys()
    assert all(torch.equal(stored[name], gone_on[name]) for name in stored)
    assert any(not torch.equal(stored[name], afresh[name]) for name in stored)


def test_another_method_s_head_is_refused(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert trained(monkeypatch, [*arguments(tmp_path, target, data), "--start-from", str(target)]) == 2
    assert "start from a folder that `paceline train` wrote" in caplog.text
    caplog.clear()
    save_file({"0.0.linear.weight": torch.zeros(3, 3)}, tmp_path / "medusa_lm_head.safetensors")
    assert trained(monkeypatch, [*arguments(tmp_path, target, data), "--start-from", str(tmp_path)]) == 2
    assert "medusa_lm_head.safetensors has " in caplog.text


def test_text_may_be_shorter_than_the_rows_of_the_schedule(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Including the last phase, which would fail when the budget is almost spent."""
    short = text(tmp_path / "short.jsonl", documents=2, tokens=200)
    assert trained(monkeypatch, arguments(tmp_path, target, short)) == 0
    assert math.isfinite(journal(tmp_path)[-1]["held_out_loss"])
    assert all(map(math.isfinite, journal(tmp_path)[-1]["accepted_by_depth"]))


def test_rows_are_no_longer_than_the_text_and_the_positions(target: Path, data: Path) -> None:
    schedule = Schedule((Phase(0.5, 4, 100), Phase(1.0, 1, 2048)), muon_rate=0.5)
    assert train_head.fitting(schedule, 511) == Schedule((Phase(0.5, 4, 100), Phase(1.0, 1, 511)), muon_rate=0.5)
    model = train_head.AutoModelForCausalLM.from_pretrained(target)
    assert train_head._longest(model, [np.arange(400), np.arange(400)]) == POSITIONS - 1
    assert train_head._longest(model, [np.arange(100), np.arange(100)]) == 199


def test_held_out_files_are_not_learned_from(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out, learned = text(tmp_path / "held.jsonl", 1), list[int]()

    class Watched(train_head.TargetOutputCache):
        def __init__(self, reader: TargetReader, documents: Sequence[Ids], free_bytes: int) -> None:
            learned.append(len(documents))
            super().__init__(reader, documents, free_bytes)

    monkeypatch.setattr(train_head, "TargetOutputCache", Watched)
    assert trained(monkeypatch, [*arguments(tmp_path, target, data), "--held-out", str(held_out)]) == 0
    assert trained(monkeypatch, arguments(tmp_path / "other", target, data)) == 0
    assert learned == [60, 59]


def test_a_refusal_is_one_line_and_exit_code_2(data: Path, tmp_path: Path) -> None:
    done = command(arguments(tmp_path, tmp_path / "nowhere", data))
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert f"no model at {tmp_path / 'nowhere'}" in line


def bad_line(folder: Path) -> Path:
    (folder / "bad.jsonl").write_text('{"text": "1 2 3"}\n{"txt": "4"}\n')
    return folder / "bad.jsonl"


def of_a_larger_vocabulary(folder: Path) -> Path:
    save_documents(folder / "large.npz", [np.arange(VOCABULARY + 200, dtype=np.uint16)] * 3)
    return folder / "large.npz"


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        (bad_line, "bad.jsonl, line 2: needs `text`"),
        (of_a_larger_vocabulary, f"token {VOCABULARY + 199} is to learn from"),
        (lambda folder: folder / "none.txt", "No such file"),
        (lambda folder: text(folder / "one.jsonl", 1), "1 documents cannot be divided"),
        (lambda folder: text(folder / "few.jsonl", 2, tokens=127), "127 tokens are to learn from: give at least 128"),
    ],
    ids=["bad line", "larger vocabulary", "no file", "one document", "few tokens"],
)
def test_bad_data_is_refused_in_one_line(
    target: Path,
    tmp_path: Path,
    made: Any,
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert trained(monkeypatch, arguments(tmp_path, target, made(tmp_path))) == 2
    [record] = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert complaint in record.getMessage()
    assert "\n" not in record.getMessage()


def test_too_little_is_held_out(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held_out = text(tmp_path / "held.jsonl", 1, tokens=100)
    assert trained(monkeypatch, [*arguments(tmp_path, target, data), "--held-out", str(held_out)]) == 2
    assert "100 tokens are held out" in caplog.text


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("table:64", "has no weights"), ("llama", "llama cannot be read"), ("foreign", "foreign cannot be read")],
)
def test_a_target_without_weights_is_refused_in_one_line(
    data: Path,
    tmp_path: Path,
    name: str,
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for kind in ("llama", "foreign"):  # without weights, and of an unknown kind
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps({"model_type": kind}))
    model = name if ":" in name else tmp_path / name
    assert trained(monkeypatch, arguments(tmp_path, model, data)) == 2
    [record] = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert complaint in record.getMessage()
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "soon"])
def test_a_budget_is_some_time(
    minutes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        trained(monkeypatch, [*arguments(tmp_path, "pydoc", tmp_path), f"--minutes={minutes}"])
    assert exited.value.code == 2
    assert "--minutes" in capsys.readouterr().err.splitlines()[-1]
