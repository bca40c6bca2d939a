"""Build the family that ships with the package, from the standard library of the running Python.

    python -m paceline.training.family all --minutes 120 --work-dir work --out paceline/family

`tokenizer` trains the tokenizer and encodes the corpus; `target` trains the target; `draft` lets the target
write and read, and trains the draft on what it said; `card` measures both and writes their cards; `export`
writes the newest checkpoint of a target still in training. Everything can be stopped by SIGTERM and started
again, with other threads or another budget.
"""

import argparse
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from paceline.training import evaluation
from paceline.training.card import Training, draft_card, target_card
from paceline.training.chats import chats
from paceline.training.corpus import source_texts
from paceline.training.distil import Lessons, ask, begin_draft, corpus_rows, write, written_rows
from paceline.training.models import (
    draft_config,
    load_model,
    new_model,
    next_token_loss,
    save_model,
    target_config,
)
from paceline.training.session import Stopped, read_journal, train
from paceline.training.tokenizer import load_tokenizer, train_tokenizer
from paceline.training.tokens import (
    Ids,
    corpus_documents,
    corpus_stream,
    held_out_documents,
    load_documents,
    save_documents,
    windows,
)
from paceline.training.trainer import Phase, Schedule, Trainer

log = logging.getLogger(__name__)

TARGET_SCHEDULE = Schedule((Phase(0.78, 16, 256), Phase(1.0, 2, 2048)))
DRAFT_SCHEDULE = Schedule((Phase(1.0, 8, 512),))
DRAFT_SHARE = 0.1
"""Of the minutes given to `all`."""


@dataclass(frozen=True)
class Family:
    """Where a family is made, and with what means. `minutes` is the training time of one model."""

    work_dir: Path
    out: Path
    device: str
    minutes: float
    lesson_rows: int

    @property
    def target_folder(self) -> Path:
        return self.out / "pydoc"

    @property
    def draft_folder(self) -> Path:
        return self.out / "pydoc-draft"

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return load_tokenizer(self.work_dir / "tokenizer")

    def corpus(self) -> list[Ids]:
        return load_documents(self.work_dir / "corpus.npz")

    def held_out(self) -> list[Ids]:
        return load_documents(self.work_dir / "held_out.npz")

    def target(self) -> LlamaForCausalLM:
        return load_model(self.target_folder, self.device)


def build_tokenizer(family: Family) -> None:
    """Train the tokenizer and encode the corpus."""
    conversations = [message["content"] for chat in chats() for message in chat]
    tokenizer = train_tokenizer(source_texts() + conversations)
    tokenizer.save_pretrained(family.work_dir / "tokenizer")
    save_documents(family.work_dir / "corpus.npz", corpus_documents(tokenizer))
    save_documents(family.work_dir / "held_out.npz", held_out_documents(tokenizer))


def train_target(family: Family) -> None:
    """Train the target until its budget is spent, then export it."""
    trainer = _target_trainer(family)
    train(trainer, family.work_dir / "target", family.held_out())
    save_model(trainer.model, family.tokenizer(), family.target_folder)


def export_target(family: Family) -> None:
    """Write the newest checkpoint of the target in the layout that ships."""
    save_model(_target_trainer(family).model, family.tokenizer(), family.target_folder)


def train_draft(family: Family) -> None:
    """Train the draft on the exported target's laws, then export it."""
    trainer = _draft_trainer(family)
    train(trainer, family.work_dir / "draft", family.held_out())
    save_model(trainer.model, family.tokenizer(), family.draft_folder)


def write_cards(family: Family) -> None:
    """Measure both exported models and write their model cards."""
    target, draft = family.target(), load_model(family.draft_folder, family.device)
    measured = _measure(family, target, draft)
    (family.work_dir / "measured.json").write_text(json.dumps(measured, indent=1))
    target_training = Training.from_journal(read_journal(family.work_dir / "target.jsonl"))
    draft_training = Training.from_journal(read_journal(family.work_dir / "draft.jsonl"))
    (family.target_folder / "README.md").write_text(target_card(target.config, target_training, measured))
    (family.draft_folder / "README.md").write_text(draft_card(draft.config, draft_training, measured))


def build_all(family: Family) -> None:
    """Everything in order; the minutes are shared between target and draft."""
    if not (family.work_dir / "held_out.npz").exists():
        build_tokenizer(family)
    train_target(replace(family, minutes=family.minutes * (1 - DRAFT_SHARE)))
    train_draft(replace(family, minutes=family.minutes * DRAFT_SHARE))
    write_cards(family)


def _target_trainer(family: Family) -> Trainer[LlamaForCausalLM]:
    """The target's trainer, where its last checkpoint left it."""
    model = new_model(target_config(), seed=0).to(family.device)
    trainer = Trainer(
        model, corpus_stream(family.corpus(), seed=1), next_token_loss, TARGET_SCHEDULE, 60 * family.minutes
    )
    return _resumed(trainer, family.work_dir / "target.pt")


def _draft_trainer(family: Family) -> Trainer[LlamaForCausalLM]:
    """The draft's trainer, where its last checkpoint left it."""
    lessons = _lessons(family)
    draft = new_model(draft_config(), seed=4).to(family.device)
    begin_draft(draft, family.target())
    trainer = Trainer(draft, lessons.stream(seed=5), lessons.divergence, DRAFT_SCHEDULE, 60 * family.minutes)
    return _resumed(trainer, family.work_dir / "draft.pt")


def _resumed(trainer: Trainer[LlamaForCausalLM], checkpoint: Path) -> Trainer[LlamaForCausalLM]:
    if checkpoint.exists():
        trainer.load(checkpoint)
    return trainer


def _lessons(family: Family) -> Lessons:
    """The lessons in the work folder, or new ones: a quarter the target's own text, the rest corpus text."""
    stored = family.work_dir / "lessons.pt"
    if not stored.exists():
        target, documents = family.target(), family.corpus()
        length = DRAFT_SCHEDULE.phases[0].length
        written = written_rows(target, documents, family.lesson_rows // 4, length, seed=2)
        log.info("the target wrote %d tokens", written.numel())
        read = corpus_rows(documents, family.lesson_rows - len(written), length, seed=3)
        ask(target, torch.cat([written, read])).save(stored)
    return Lessons.load(stored)


def _measure(family: Family, target: LlamaForCausalLM, draft: LlamaForCausalLM) -> dict[str, Any]:
    tokenizer = family.tokenizer()
    temperatures = (0.0, 0.8)
    return {
        "target_parameters": target.num_parameters(),
        "draft_parameters": draft.num_parameters(),
        "corpus_tokens": sum(map(len, family.corpus())),
        "lesson_tokens": _lessons(family).ids_RL.numel(),
        "target_step_ms": evaluation.step_milliseconds(target),
        "draft_step_ms": evaluation.step_milliseconds(draft),
        "parsing": {str(t): evaluation.parse_counts(target, tokenizer, t) for t in temperatures},
        "answers": evaluation.answers(target, tokenizer),
        "agreement": _agreements(family.held_out(), target, draft),
    }


def _agreements(held_out: list[Ids], target: LlamaForCausalLM, draft: LlamaForCausalLM) -> dict[str, float]:
    def on(rows: Tensor, first: int = 0) -> float:
        return evaluation.agreement(draft, target, rows, first)

    def written(temperature: float) -> Tensor:
        return write(target, windows(held_out, 64, seed=7)[:64, :-1], 192, temperature, seed=8)

    return {
        "held-out sources, windows of 512": on(windows(held_out, 512, seed=0)[:32, :-1]),
        "held-out sources, positions 1024 to 2047": on(windows(held_out, 2048, seed=0)[:8, :-1], 1024),
        "the target's greedy text after held-out sources": on(written(0.0)[:, :-1], 63),
        "the target's text at temperature 0.8 after held-out sources": on(written(0.8)[:, :-1], 63),
    }


COMMANDS: dict[str, Callable[[Family], None]] = {
    "tokenizer": build_tokenizer,
    "target": train_target,
    "draft": train_draft,
    "card": write_cards,
    "export": export_target,
    "all": build_all,
}


def main() -> None:
    """Parse the command line and run one command."""
    options = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(options.threads)
    options.work_dir.mkdir(parents=True, exist_ok=True)
    family = Family(options.work_dir, options.out, options.device, options.minutes, options.lesson_rows)
    try:
        COMMANDS[options.command](family)
    except Stopped as stop:
        log.warning("%s", stop)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--minutes", type=float, default=120.0, help="training time in all, over all resumes")
    parser.add_argument("--lesson-rows", type=int, default=1536, help="rows of 512 tokens that the draft learns from")
    parser.add_argument("--work-dir", type=Path, default=Path("work"), help="checkpoints, logs and encoded text")
    parser.add_argument("--out", type=Path, default=Path("paceline/family"), help="where the models are written")
    return parser


if __name__ == "__main__":
    main()
