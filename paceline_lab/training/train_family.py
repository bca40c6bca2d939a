"""Build the family that ships with the package, from the standard library of the running Python.

    python -m paceline_lab.training.train_family all --minutes 120 --work-dir work --out paceline/family

`tokenizer` trains the tokenizer and encodes the corpus; `shallow` trains the target's first 16 layers, `deep` adds
layers and trains on, `target` trains it to edit code and to extract facts; `draft` lets the target write and read, and
trains the draft on its outputs; `heads` trains heads for the target on the same text; `hybrid` trains a smaller target
whose layers keep states, on the draft's lessons, and its layer for multi-token prediction; `card` measures all and
writes their cards; `export` writes the newest checkpoint of a target still in training. Every step can be stopped by
SIGTERM and resumed, with other threads or another budget.
"""

import argparse
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from paceline.family import HEADS
from paceline_lab.training.family.distillation import DistillationData, begin_draft, target_top_probs
from paceline_lab.training.family.docstring_chats import chats, questions
from paceline_lab.training.family.edit_chats import edits
from paceline_lab.training.family.extraction_chats import extractions
from paceline_lab.training.family.family_evaluation import greedy_responses, measure, stored_parameters
from paceline_lab.training.family.family_models import (
    deepened,
    draft_config,
    new_model,
    next_token_loss,
    save_model,
    shallow_config,
    target_config,
)
from paceline_lab.training.family.family_tokenizer import train_tokenizer
from paceline_lab.training.family.hybrid_model import hybrid_config, load_hybrid, new_hybrid, save_hybrid
from paceline_lab.training.family.model_card import TrainingRecord, draft_card, head_card, hybrid_card, target_card
from paceline_lab.training.family.stdlib_corpus import source_texts
from paceline_lab.training.family.target_text import PIECE, continuations_by_target, question_responses
from paceline_lab.training.family.token_corpus import (
    Ids,
    corpus_documents,
    corpus_stream,
    encode_documents,
    held_out_documents,
    render_chats,
    save_documents,
    windows,
)
from paceline_lab.training.family.trainer import Model, Phase, Schedule, Trainer
from paceline_lab.training.family.training_session import TrainingStopped, held_out_loss_of, read_journal, train
from paceline_lab.training.family.workspace import Workspace
from paceline_lab.training.heads.hybrid_mtp_module import begun_mtp
from paceline_lab.training.heads.target_output_cache import TargetOutputCache
from paceline_lab.training.heads.target_reader import TargetReader, draft_loss
from paceline_lab.training.heads.train_head import RECIPES, HeadTrainingOptions, evaluation, train_head

log = logging.getLogger(__name__)

SHALLOW_SCHEDULE = Schedule((Phase(0.82, 16, 256), Phase(1.0, 2, 2048)))
DEEP_SCHEDULE = Schedule((Phase(0.82, 16, 256), Phase(1.0, 2, 2048)), muon_rate=0.01, adam_rate=1.5e-3, decay_from=0.1)
TAUGHT_SCHEDULE = Schedule((Phase(1.0, 2, 1024),), muon_rate=0.006, adam_rate=5e-4, warmup=0.02, decay_from=0.05)
DRAFT_SCHEDULE = Schedule((Phase(1.0, 4, 1024),))
HYBRID_SCHEDULE = Schedule((Phase(1.0, 1, 1024),))
HYBRID_MTP_SCHEDULE = Schedule((Phase(1.0, 1, 512),), adam_rate=2e-3)
ANSWERED = 48
"""About the tokens of a question and its answer."""
EDITS, EXTRACTIONS, READ = 9000, 3000, 700_000
"""Chats of two kinds for the target's last training, and tokens of other text, so that it forgets nothing."""
PART = 6000
"""Most tokens of one document of the other text."""
HYBRID_MEMORY = 2 * 10**9
"""Bytes for the hybrid's outputs, so that it reads the text once."""
MODELS = ("shallow", "deep", "target", "draft")
SHARES = {"shallow": 0.35, "deep": 0.15, "target": 0.15, "draft": 0.1, "heads": 0.15, "hybrid": 0.1}
"""Shares of the minutes of `all`."""
HYBRID_SHARES = {"hybrid": 0.7, "hybrid-mtp": 0.3}
"""Shares of the hybrid's minutes."""
HEAD_SHARES = {"eagle3": 0.6, "eagle": 0.1, "mtp": 0.1, "medusa": 0.1, "mlp_speculator": 0.1}
"""Shares of the heads' minutes."""


def build_tokenizer(space: Workspace) -> None:
    """Train the tokenizer and encode the corpus."""
    conversations = [message["content"] for chat in chats() for message in chat]
    tokenizer = train_tokenizer(source_texts() + conversations)
    tokenizer.save_pretrained(space.tokenizer_folder)
    save_documents(space.corpus_file, corpus_documents(tokenizer))
    save_documents(space.held_out_file, held_out_documents(tokenizer))


def train_shallow(space: Workspace) -> None:
    """Train the first layers until their budget is spent."""
    _train_model(space, "shallow", _shallow_trainer(space), space.shallow_folder)


def train_deep(space: Workspace) -> None:
    """Deepen the target and train it until its budget is spent."""
    _train_model(space, "deep", _deep_trainer(space), space.deep_folder)


def train_target(space: Workspace) -> None:
    """Train the deepened target on edits and facts until its budget is spent, then export it."""
    _train_model(space, "target", _target_trainer(space), space.target_folder)


def export_target(space: Workspace) -> None:
    """Write the newest checkpoint of the target in the layout that ships."""
    save_model(_target_trainer(space).model, space.tokenizer(), space.target_folder)


def train_draft(space: Workspace) -> None:
    """Train the draft on the exported target's distributions, then export it."""
    _train_model(space, "draft", _draft_trainer(space), space.draft_folder)


def _train_model(space: Workspace, name: str, trainer: Trainer[LlamaForCausalLM], folder: Path) -> None:
    """Train until the budget is spent, with checkpoint and journal named `name`, then write the model to `folder`."""
    train(trainer, space.folder / name, held_out_loss_of(trainer.model, space.held_out()))
    save_model(trainer.model, space.tokenizer(), folder)


def train_heads(space: Workspace) -> None:
    """Train each head on the text of the draft's lessons."""
    read = space.read_file
    if not read.exists():
        save_documents(read, [row.astype(np.uint16) for row in _lessons(space).ids_RL.numpy()])
    for method, name in HEADS.items():
        train_head(
            HeadTrainingOptions(
                method,
                str(space.target_folder),
                [read],
                space.out / name,
                [space.held_out_file],
                minutes=space.minutes * HEAD_SHARES[method],
                work_dir=space.folder,
                threads=torch.get_num_threads(),
                device=space.device,
            )
        )


def train_hybrid(space: Workspace) -> None:
    """Train the hybrid on the draft's lessons, then its layer for multi-token prediction on its own outputs, and write
    both with their card. Both learn in float32."""
    lessons, held_out = _lessons(space), space.held_out()
    minutes = {name: space.minutes * share for name, share in HYBRID_SHARES.items()}
    hybrid = new_hybrid(hybrid_config(), space.target(), seed=8).to(space.device)
    trainer = Trainer(
        hybrid, lessons.stream(seed=9), lessons.divergence, HYBRID_SCHEDULE, 60 * minutes["hybrid"], dtype=torch.float32
    )
    _resumed(trainer, space.folder / "hybrid.pt")
    train(trainer, space.folder / "hybrid", held_out_loss_of(hybrid, held_out))

    recipe = RECIPES["mtp"]
    mtp = begun_mtp(hybrid, seed=10).to(space.device)
    reader = TargetReader(hybrid, recipe.layers(hybrid.config.num_hidden_layers))
    library = TargetOutputCache(reader, space.corpus(), HYBRID_MEMORY)

    def loss(model: nn.Module, names: Tensor) -> Tensor:
        reading = library.read(names)
        return draft_loss(model(reading, recipe.steps), reading)

    stream, budget = library.stream(seed=21), 60 * minutes["hybrid-mtp"]
    head = Trainer(mtp, stream, loss, HYBRID_MTP_SCHEDULE, budget, dtype=torch.float32)
    _resumed(head, space.folder / "hybrid-mtp.pt")
    train(head, space.folder / "hybrid-mtp", evaluation(mtp, recipe.steps, reader, held_out))
    save_hybrid(hybrid, mtp, space.tokenizer(), space.hybrid_folder)
    write_hybrid_card(space)


def write_hybrid_card(space: Workspace) -> None:
    """Measure the exported hybrid and write its card."""
    folder, hybrid = space.hybrid_folder, load_hybrid(space.hybrid_folder)
    journal, mtp_journal = (read_journal(space.folder / f"{name}.jsonl") for name in HYBRID_SHARES)
    measured = {
        "parameters": stored_parameters(folder),
        "lesson_tokens": DistillationData.load(space.lessons_file).ids_RL.numel(),
        "answers": greedy_responses(hybrid, space.tokenizer()),
    }
    (folder / "README.md").write_text(hybrid_card(hybrid.config, journal, mtp_journal, measured))


def write_cards(space: Workspace) -> None:
    """Measure the exported models and write all model cards."""
    target, draft = space.target(), space.draft()
    trainings = {
        model: TrainingRecord.from_journal(read_journal(space.folder / f"{model}.jsonl")) for model in (*MODELS, *HEADS)
    }
    measured = measure(target, draft, space.tokenizer(), space.held_out()) | {
        "corpus_tokens": sum(map(len, space.corpus())),
        "lesson_tokens": DistillationData.load(space.lessons_file).ids_RL.numel(),
        "minutes": sum(training.seconds for training in trainings.values()) / 60,
    }
    shallow_training, deep_training, target_training, draft_training = (trainings[model] for model in MODELS)
    (space.folder / "measured.json").write_text(json.dumps(measured, indent=1))
    (space.target_folder / "README.md").write_text(
        target_card(target.config, shallow_config(), (shallow_training, deep_training, target_training), measured)
    )
    (space.draft_folder / "README.md").write_text(draft_card(draft.config, draft_training, measured))
    for method, name in HEADS.items():
        folder, journal = space.out / name, read_journal(space.folder / f"{method}.jsonl")
        (folder / "README.md").write_text(head_card(method, name, stored_parameters(folder), journal, measured))


def build_all(space: Workspace) -> None:
    """Everything in order; the minutes are shared between the trainings."""
    if not space.held_out_file.exists():
        build_tokenizer(space)
    for model, share in SHARES.items():
        COMMANDS[model](replace(space, minutes=space.minutes * share))
    write_cards(space)


def _shallow_trainer(space: Workspace) -> Trainer[LlamaForCausalLM]:
    """The trainer of the first layers, resumed from its last checkpoint."""
    model, stream = new_model(shallow_config(), seed=0).to(space.device), corpus_stream(space.corpus(), seed=1)
    trainer = Trainer(model, stream, next_token_loss, SHALLOW_SCHEDULE, 60 * space.minutes)
    return _resumed(trainer, space.folder / "shallow.pt")


def _deep_trainer(space: Workspace) -> Trainer[LlamaForCausalLM]:
    """The trainer of all layers, resumed from its last checkpoint."""
    model, stream = deepened(space.shallow(), target_config()).to(space.device), corpus_stream(space.corpus(), seed=6)
    trainer = Trainer(model, stream, next_token_loss, DEEP_SCHEDULE, 60 * space.minutes)
    return _resumed(trainer, space.folder / "deep.pt")


def _target_trainer(space: Workspace) -> Trainer[LlamaForCausalLM]:
    """The target's trainer, resumed from its last checkpoint."""
    stream = corpus_stream(_taught(space), seed=31)
    model = deepened(space.deep(), target_config()).to(space.device)
    trainer = Trainer(model, stream, next_token_loss, TAUGHT_SCHEDULE, 60 * space.minutes)
    return _resumed(trainer, space.folder / "target.pt")


def _taught(space: Workspace) -> list[Ids]:
    """The target's last training text: copies, and some of everything else."""
    corpus = space.corpus()
    order = iter(np.random.default_rng(5).permutation(len(corpus)))
    others: list[Ids] = []
    while sum(map(len, others)) < READ and (index := next(order, None)) is not None:
        others.append(corpus[index][:PART])
    return _copies(space) + others


def _copies(space: Workspace) -> list[Ids]:
    """Chats in which most of an answer is a copy of the question."""
    tokenizer = space.tokenizer()
    copies = [*edits(source_texts(), EDITS, seed=1), *extractions(EXTRACTIONS, seed=2)]
    return encode_documents(tokenizer, render_chats(tokenizer, copies))


def _draft_trainer(space: Workspace) -> Trainer[LlamaForCausalLM]:
    """The draft's trainer, resumed from its last checkpoint."""
    lessons = _lessons(space)
    draft = new_model(draft_config(), seed=4).to(space.device)
    begin_draft(draft, space.target())
    trainer = Trainer(draft, lessons.stream(seed=5), lessons.divergence, DRAFT_SCHEDULE, 60 * space.minutes)
    return _resumed(trainer, space.folder / "draft.pt")


def _resumed(trainer: Trainer[Model], checkpoint: Path) -> Trainer[Model]:
    if checkpoint.exists():
        trainer.load(checkpoint)
    return trainer


def _lessons(space: Workspace) -> DistillationData:
    """The lessons in the work folder, or new ones: half training text, the rest written by the target."""
    stored = space.lessons_file
    if not stored.exists():
        target, read = space.target(), space.corpus() + _copies(space)
        quarter, length = space.lesson_rows // 4, DRAFT_SCHEDULE.phases[0].length
        pieces = continuations_by_target(target, read, quarter * length // PIECE, seed=2)
        responses = question_responses(
            target, space.tokenizer(), questions(quarter * length // ANSWERED, seed=3), seed=3
        )
        log.info("the target wrote %d pieces and %d answers", len(pieces), len(responses))
        rows = [
            windows(documents, length, seed=4)[: share * quarter, :-1]
            for documents, share in ((read, 2), (pieces, 1), (responses, 1))
        ]
        target_top_probs(target, torch.cat(rows)).save(stored)
    return DistillationData.load(stored)


COMMANDS: dict[str, Callable[[Workspace], None]] = {
    "tokenizer": build_tokenizer,
    "shallow": train_shallow,
    "deep": train_deep,
    "target": train_target,
    "draft": train_draft,
    "heads": train_heads,
    "hybrid": train_hybrid,
    "card": write_cards,
    "export": export_target,
    "all": build_all,
}


def main() -> int:
    """Parse the command line and run one command."""
    options = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(options.threads)
    options.work_dir.mkdir(parents=True, exist_ok=True)
    space = Workspace(options.work_dir, options.out, options.device, options.minutes, options.lesson_rows)
    try:
        COMMANDS[options.command](space)
    except TrainingStopped as stop:
        log.warning("%s", stop)
        return stop.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--minutes", type=float, default=120.0, help="training time in all, over all resumes")
    parser.add_argument("--lesson-rows", type=int, default=1000, help="rows of 1024 tokens that the draft learns from")
    parser.add_argument("--work-dir", type=Path, default=Path("work"), help="checkpoints, logs and encoded text")
    parser.add_argument("--out", type=Path, default=Path("paceline/family"), help="where the models are written")
    return parser


if __name__ == "__main__":
    sys.exit(main())
