"""Train a head for an existing target, on text that the target would write.

    paceline train eagle3 --target pydoc --data chats.jsonl more.txt --out pydoc-eagle3

The target reads the text, and the head learns the target's distributions, not the text itself; text written by the
target works best. Training can be stopped by SIGTERM and resumed, with other threads or another budget. The share of
accepted draft tokens is measured on held-out text every few minutes. The files have the layout that the method's
authors publish, which other servers read as well.
"""

import argparse
import json
import logging
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from paceline import family
from paceline.gguf.gguf_file import is_gguf
from paceline.model.loading import read_gguf
from paceline.model.transformers_setup import model_config
from paceline.model_names import ModelNotFoundError, is_fake_model, resolve_model
from paceline_lab.training.family.token_corpus import Ids, windows
from paceline_lab.training.family.trainer import Phase, Schedule, Trainer
from paceline_lab.training.family.training_session import TrainingStopped, train
from paceline_lab.training.heads.eagle3_module import Eagle3Module
from paceline_lab.training.heads.eagle_module import EagleModule
from paceline_lab.training.heads.medusa_module import MedusaModule
from paceline_lab.training.heads.mlp_speculator_module import MlpSpeculatorModule
from paceline_lab.training.heads.mtp_module import MtpModule
from paceline_lab.training.heads.small_draft_module import SmallDraftModule
from paceline_lab.training.heads.target_output_cache import TargetOutputCache
from paceline_lab.training.heads.target_reader import TargetReader, accepted_by_depth, draft_loss
from paceline_lab.training.heads.text_files import TextError, divided, read_documents

log = logging.getLogger(__name__)

SCHEDULE = Schedule((Phase(0.88, 4, 512), Phase(1.0, 1, 2048)), muon_rate=0.02, adam_rate=2e-3, decay_from=0.3)
INNER = 4
"""The width of a head's MLP, in hidden sizes."""
READ_BEFORE = 64
"""Tokens of a held-out row before the first evaluated position."""
LEAST = 2 * READ_BEFORE
"""Fewest tokens to train or to evaluate on."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
MEDUSA_HEADS = 3
MLP_STEPS = 4
PARD_STEPS = 4
SMALL_LAYERS = 2

Described = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HeadRecipe:
    """One kind of draft. `steps`: the depth it is trained to; deeper drafts repeat the last step, if the method can."""

    steps: int
    layers: Callable[[int], Sequence[int]]
    """From the target's number of layers to the layers whose states the head reads."""
    begin: Callable[[LlamaConfig, PreTrainedModel], nn.Module]
    config: Callable[[LlamaConfig], Described]
    """Contents of config.json."""
    stored_as: Callable[[str], str] = lambda name: name
    """The published name of a parameter."""
    file: str = "model.safetensors"
    whole: bool = False
    """Whether it is a model of its own, with a tokenizer. Its output matrix is tied if the target's is."""


def _own_name(name: str) -> str:
    """A parameter's name without the module around the model."""
    return name.removeprefix("model.")


def _last(layers: int) -> Sequence[int]:
    return (layers + 1,)


def _none(layers: int) -> Sequence[int]:
    return (layers,)  # a reader needs at least one, used or not


def _llama(config: LlamaConfig) -> Described:
    """A one-layer Llama, as EAGLE's uploads describe their layer."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _small(config: LlamaConfig) -> LlamaConfig:
    """Two layers: the second can copy from the context, because the first marks each token with the one before it
    (induction heads, Olsson et al. 2022)."""
    return LlamaConfig(**{**config.to_dict(), "num_hidden_layers": SMALL_LAYERS})


def _whole(config: LlamaConfig) -> Described:
    """As transformers describes a whole model."""
    return {**_llama(config), **_special(config), "num_hidden_layers": SMALL_LAYERS}


def _special(config: LlamaConfig) -> Described:
    keys = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
    return {key: getattr(config, key) for key in keys}


def _mask(config: LlamaConfig) -> int:
    """The token that a parallel draft reads for an unknown token: one that is rare in text."""
    for token in (config.pad_token_id, config.bos_token_id, config.eos_token_id):
        if token is not None:
            return int(token[0] if isinstance(token, list) else token)
    return 0


def _output(target: PreTrainedModel) -> Tensor:
    weight: Tensor = target.get_output_embeddings().weight
    return weight


RECIPES: Mapping[str, HeadRecipe] = {
    "eagle3": HeadRecipe(
        4,
        lambda layers: (2, layers // 2, layers - 3),
        lambda config, target: Eagle3Module(config, 3, _output(target)),
        lambda config: {**_llama(config), "draft_vocab_size": getattr(config, "draft_vocab_size", config.vocab_size)},
    ),
    "eagle": HeadRecipe(
        4, _last, lambda config, _: EagleModule(config), lambda config: {**_llama(config), "bias": False}
    ),
    "medusa": HeadRecipe(
        MEDUSA_HEADS,
        _last,
        lambda _, target: MedusaModule(MEDUSA_HEADS, _output(target)),
        lambda config: {
            "medusa_num_heads": MEDUSA_HEADS,
            "medusa_num_layers": 1,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
        },
        lambda name: name.removeprefix("heads."),
        "medusa_lm_head.safetensors",
    ),
    "mlp_speculator": HeadRecipe(
        MLP_STEPS,
        _last,
        lambda config, target: MlpSpeculatorModule(MLP_STEPS, config.hidden_size, _output(target)),
        lambda config: {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "vocab_size": config.vocab_size,
            "emb_dim": config.hidden_size,
            "inner_dim": config.hidden_size,
            "n_predict": MLP_STEPS,
            "top_k_tokens_per_head": [5, 4, 3, 2],
            "n_candidates": 5,
            "tie_weights": True,
            "scale_input": False,
        },
        lambda name: f"speculator.{name}",
    ),
    "mtp": HeadRecipe(
        4,
        _last,
        lambda _, target: MtpModule(target.config),
        lambda config: {
            "speculators_model_type": "mtp",
            "architectures": ["MTPDraftModel"],
            "transformer_layer_config": _llama(config),
            "num_nextn_predict_layers": 1,
        },
        lambda name: f"mtp_layers.0.{name}",
    ),
    "draft_model": HeadRecipe(
        1, _none, lambda config, target: SmallDraftModule(_small(config), target, 0), _whole, _own_name, whole=True
    ),
    "pard": HeadRecipe(
        PARD_STEPS,
        _none,
        lambda config, target: SmallDraftModule(_small(config), target, _mask(config)),
        lambda config: {**_whole(config), "pard_token": _mask(config)},
        _own_name,
        whole=True,
    ),
}


@dataclass(frozen=True)
class HeadTrainingOptions:
    """What to train, on which text. `minutes` is the training time over all resumes."""

    method: str
    target: str
    data: Sequence[Path]
    out: Path
    held_out: Sequence[Path] | None = None
    start_from: Path | None = None
    """The folder of a head written by `paceline train`, or the name of one that ships; None: start untrained."""
    draft_vocab_size: int | None = None
    """Tokens that the head can predict, the most frequent ones of the text; None: all."""
    share_output: bool = False
    """Whether the head predicts by the target's output matrix and has none of its own."""
    intermediate_size: int | None = None
    """The width of the head's MLP; None: INNER hidden sizes."""
    batch_rows: int | None = None
    """Rows of 512 tokens in a step; None: those of SCHEDULE."""
    minutes: float = 60.0
    work_dir: Path = Path("work")
    keep_gb: float = 4.0
    """Memory for the target's outputs, so that it reads the text once."""
    threads: int = 2
    device: str = "cpu"

    @property
    def start_folder(self) -> Path | None:
        """Where the head to start from is."""
        shipped = str(self.start_from) in family.SHIPPED
        return family.path(str(self.start_from)) if shipped else self.start_from


class HeadTrainingError(ValueError):
    """A head that training cannot start from."""


def train_head(options: HeadTrainingOptions) -> None:
    """Train until the budget is spent, then write the head. Writes checkpoint and journal beside each other, named by
    the method. Raises `TextError`, `HeadTrainingError`, `ModelNotFoundError`, OSError; `TrainingStopped` on a
    signal."""
    recipe = RECIPES[options.method]
    target = _target(options)
    learned, held_out = _texts(options, target)
    vocabulary = _draft_vocabulary(options, learned)
    reader = TargetReader(target, recipe.layers(target.config.num_hidden_layers), vocabulary)
    config = head_config(target.config, options.intermediate_size)
    torch.manual_seed(0)
    head = recipe.begin(config, target).float()
    if vocabulary is not None:
        _eagle3(head, "--draft-vocab-size").restrict(vocabulary)
        config.draft_vocab_size = len(vocabulary)
    if options.share_output:
        _eagle3(head, "--share-output").share_output()
    head.to(options.device)
    if options.start_folder:
        load_head(head, recipe, options.start_folder)
    library = TargetOutputCache(reader, learned, round(options.keep_gb * 1e9))

    def loss(model: nn.Module, names: Tensor) -> Tensor:
        reading = library.read(names)
        return draft_loss(model(reading, recipe.steps), reading)

    schedule = fitting(SCHEDULE, _longest(target, learned), options.batch_rows)
    trainer = Trainer(head, library.stream(seed=21), loss, schedule, 60 * options.minutes)
    checkpoint = options.work_dir / options.method
    if checkpoint.with_suffix(".pt").exists():
        trainer.load(checkpoint.with_suffix(".pt"))
    train(trainer, checkpoint, evaluation(trainer.model, recipe.steps, reader, held_out))
    save_head(trainer.model, recipe, config, options.out)
    if recipe.whole:
        copy_tokenizer(Path(resolve_model(options.target)), options.out)


def fitting(schedule: Schedule, longest: int, batch_rows: int | None = None) -> Schedule:
    """The schedule with rows of at most `longest` tokens. `batch_rows`: of its first phase; None: as it is."""
    first, *later = (replace(phase, length=min(phase.length, longest)) for phase in schedule.phases)
    return replace(schedule, phases=(replace(first, rows=batch_rows or first.rows), *later))


def evaluation(head: nn.Module, steps: int, reader: TargetReader, documents: Sequence[Ids]) -> Callable[[], Described]:
    """A function that evaluates a head on held-out documents: its loss, and the share of tokens accepted by depth."""
    rows = windows(documents, min(512, _longest(reader.target, documents)), seed=0)[:16, :-1]

    @torch.no_grad()
    def evaluate() -> Described:
        reading = reader.read(rows)
        logits = head(reading, steps)
        accepted = accepted_by_depth(logits, reading, READ_BEFORE)
        return {
            "held_out_loss": float(draft_loss(logits, reading)),
            "accepted_by_depth": [round(float(share), 4) for share in accepted],
        }

    return evaluate


def most_frequent(documents: Sequence[Ids], count: int) -> Tensor:
    """The `count` most frequent tokens of the documents, or all if there are fewer: int64, rising."""
    counts = torch.bincount(torch.from_numpy(np.concatenate(documents).astype(np.int64)))
    found = min(count, int((counts > 0).sum()))
    return counts.topk(found).indices.sort().values


def head_config(target: Any, intermediate_size: int | None = None) -> LlamaConfig:
    """The configuration of one layer as wide as the target's."""
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size or INNER * target.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        pad_token_id=target.pad_token_id,
        tie_word_embeddings=target.tie_word_embeddings,
    )


def save_head(head: nn.Module, recipe: HeadRecipe, config: LlamaConfig, folder: Path) -> None:
    """Write a head in bfloat16, in the layout of its method's uploads."""
    folder.mkdir(parents=True, exist_ok=True)
    named = {
        **dict(head.named_parameters()),
        **_vocabulary_buffers(head),
    }  # a tied output matrix has no name of its own
    tensors = {recipe.stored_as(name): _stored(tensor) for name, tensor in named.items()}
    save_file(tensors, folder / recipe.file, {"format": "pt"})
    (folder / recipe.file).chmod(0o644)
    (folder / "config.json").write_text(json.dumps(recipe.config(config), indent=2) + "\n")


@torch.no_grad()
def load_head(head: nn.Module, recipe: HeadRecipe, folder: Path) -> None:
    """Load what `save_head` wrote. Raises `HeadTrainingError` for any other folder."""
    file = folder / recipe.file
    if not file.is_file():
        raise HeadTrainingError(f"no {file}: start from a folder that `paceline train` wrote for the same method")
    tensors = load_file(file)
    for name, parameter in head.named_parameters():
        stored = tensors.get(recipe.stored_as(name))
        if stored is None or stored.shape != parameter.shape:
            found = "nothing" if stored is None else f"{list(stored.shape)}"
            raise HeadTrainingError(
                f"{file} has {found} for {recipe.stored_as(name)}, which is {list(parameter.shape)} here"
            )
        parameter.copy_(stored)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer's files, byte for byte."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _eagle3(head: nn.Module, option: str) -> Eagle3Module:
    """Raises `HeadTrainingError` for a head of another method, which has no such option."""
    if not isinstance(head, Eagle3Module):
        raise HeadTrainingError(f"{option} is for eagle3 heads: leave it out")
    return head


def _vocabulary_buffers(head: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in head.named_buffers() if name in ("d2t", "t2d")}


def _stored(tensor: Tensor) -> Tensor:
    rounded = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
    return rounded.detach().contiguous().cpu()


def _draft_vocabulary(options: HeadTrainingOptions, documents: Sequence[Ids]) -> Tensor | None:
    """Tokens of the head's columns, int64, rising: of the head to start from, of a training that goes on, or the most
    frequent ones. None: all tokens."""
    if options.draft_vocab_size is None:
        return None
    kept = options.work_dir / f"{options.method}-vocabulary.npy"  # the text may have grown since training began
    if not kept.exists():
        found = _stored_vocabulary(options.start_folder) if options.start_folder else None
        np.save(kept, most_frequent(documents, options.draft_vocab_size) if found is None else found)
    return torch.from_numpy(np.load(kept))


def _stored_vocabulary(folder: Path) -> Tensor | None:
    file = folder / RECIPES["eagle3"].file
    offsets = load_file(file).get("d2t") if file.is_file() else None
    return None if offsets is None else offsets + torch.arange(len(offsets))


def _texts(options: HeadTrainingOptions, target: PreTrainedModel) -> tuple[list[Ids], list[Ids]]:
    """Training and held-out documents. Raises `TextError` if either is too short or of another vocabulary."""
    eos = target.config.eos_token_id
    end = eos[:1] if isinstance(eos, list) else [] if eos is None else [eos]
    documents = read_documents(options.data, options.target, end)
    texts = (
        (documents, read_documents(options.held_out, options.target, end)) if options.held_out else divided(documents)
    )
    for each, purpose in zip(texts, ("to learn from", "held out"), strict=True):
        if (count := sum(map(len, each))) < LEAST:
            raise TextError(f"{count} tokens are {purpose}: give at least {LEAST}")
        if (largest := max(int(ids.max(initial=0)) for ids in each)) >= target.config.vocab_size:
            raise TextError(f"token {largest} is {purpose}, {options.target} has {target.config.vocab_size}")
    return texts


def _longest(target: PreTrainedModel, documents: Sequence[Ids]) -> int:
    """Most tokens of a row; it has one token more, which is only predicted."""
    return min(int(target.config.max_position_embeddings), sum(map(len, documents))) - 1


def _target(options: HeadTrainingOptions) -> PreTrainedModel:
    if is_fake_model(options.target):
        raise ModelNotFoundError(f"{options.target} has no weights: name a model with weights")
    path = resolve_model(options.target)
    try:
        if is_gguf(path):
            target: Any = read_gguf(Path(path), model_config(path), torch.bfloat16)
        else:
            target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, local_files_only=True)
    except (OSError, ValueError) as error:  # transformers writes paragraphs
        raise ModelNotFoundError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    moved: PreTrainedModel = target.to(options.device)
    return moved


def main() -> int:
    """Parse the command line and train."""
    options = HeadTrainingOptions(**vars(_parser().parse_args()))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(options.threads)
    try:
        options.work_dir.mkdir(parents=True, exist_ok=True)
        train_head(options)
    except (ModelNotFoundError, TextError, HeadTrainingError, OSError) as error:
        log.critical("%s", error)
        return 2
    except TrainingStopped as stop:
        log.warning("%s", stop)
        return stop.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paceline train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("method", choices=RECIPES)
    parser.add_argument("--target", required=True, help="the model that the head drafts for")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help=".jsonl, .txt, .md, .py or .npz files")
    parser.add_argument("--held-out", type=Path, nargs="+", help="files to evaluate on; else some of the data")
    parser.add_argument(
        "--start-from", type=Path, help="a head written by this command, to train further on other text"
    )
    parser.add_argument(
        "--draft-vocab-size", type=_positive, help="eagle3: predict the most frequent tokens of the text alone"
    )
    parser.add_argument(
        "--share-output", action="store_true", help="eagle3: predict by the target's output matrix, for a smaller file"
    )
    parser.add_argument(
        "--intermediate-size", type=_positive, help=f"of the head's MLP; {INNER} hidden sizes if absent"
    )
    parser.add_argument(
        "--batch-rows", type=_positive, help="rows of 512 tokens in a step: fewer learn more in little time"
    )
    parser.add_argument("--out", type=Path, required=True, help="the head's folder")
    parser.add_argument(
        "--minutes", type=_minutes, default=HeadTrainingOptions.minutes, help="training time in all, over all resumes"
    )
    parser.add_argument(
        "--work-dir", type=Path, default=HeadTrainingOptions.work_dir, help="checkpoints and the journal"
    )
    parser.add_argument(
        "--keep-gb",
        type=float,
        default=HeadTrainingOptions.keep_gb,
        help="memory for the target's outputs, to compute them once",
    )
    parser.add_argument("--threads", type=int, default=HeadTrainingOptions.threads)
    parser.add_argument("--device", default=HeadTrainingOptions.device)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < math.inf:
        raise ValueError
    return minutes


if __name__ == "__main__":
    sys.exit(main())
