"""Train a head for a target that exists, on text as the target would write it.

    python -m paceline.training.heads eagle3 --target pydoc --data texts.npz --held-out held_out.npz --out head

It can be stopped by SIGTERM and started again, with other threads or another budget.
"""

import argparse
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from paceline.models import resolve_model
from paceline.training.eagle3 import Eagle3, accepted_by_depth, draft_loss
from paceline.training.session import Stopped, train
from paceline.training.states import Reader
from paceline.training.tokens import Ids, corpus_stream, load_documents, windows
from paceline.training.trainer import Phase, Schedule, Trainer

log = logging.getLogger(__name__)

SCHEDULE = Schedule((Phase(0.88, 4, 512), Phase(1.0, 1, 2048)), muon_rate=0.02, adam_rate=2e-3, decay_from=0.3)
STEPS = 4
"""How deep a draft is trained: deeper guesses reuse what the last step taught."""
INNER = 4
"""The width of a head's MLP, in hidden sizes."""


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """What the command line says."""

    target: str
    data: Sequence[Path]
    held_out: Path
    work: Path
    out: Path
    minutes: float
    device: str

    def documents(self) -> list[Ids]:
        return [document for path in self.data for document in load_documents(path)]


def train_eagle3(plan: HeadPlan) -> None:
    """Train an EAGLE-3 head, and write it as the original uploads are."""
    target = _target(plan)
    config = head_config(target.config)
    layers = [2, config.target_layers // 2, config.target_layers - 3]
    reader = Reader(target, layers)
    head = Eagle3(config, len(layers), target.get_output_embeddings().weight.detach().float()).to(plan.device)

    def loss(model: nn.Module, batch_BL: Tensor) -> Tensor:
        reading = reader.read(batch_BL)
        return draft_loss(model(reading, STEPS), reading)

    trainer = Trainer(head, corpus_stream(plan.documents(), seed=21), loss, SCHEDULE, 60 * plan.minutes)
    if (checkpoint := plan.work / "eagle3.pt").exists():
        trainer.load(checkpoint)
    held_out = windows(load_documents(plan.held_out), 512, seed=0)[:16, :-1]

    @torch.no_grad()
    def evaluate() -> Mapping[str, Any]:
        reading = reader.read(held_out)
        laws = trainer.model(reading, STEPS)
        by_depth = accepted_by_depth(laws, reading, first=128)
        return {"held_out_loss": float(draft_loss(laws, reading)), "accepted": [round(float(x), 4) for x in by_depth]}

    train(trainer, plan.work / "eagle3", evaluate)
    save_head(trainer.model, config, plan.out)


def head_config(target: Any) -> LlamaConfig:
    """One layer as wide as the target's."""
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=INNER * target.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=target.num_attention_heads,
        num_key_value_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        max_position_embeddings=target.max_position_embeddings,
        draft_vocab_size=target.vocab_size,
        target_layers=target.num_hidden_layers,
    )


def save_head(head: nn.Module, config: LlamaConfig, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous().cpu() for name, tensor in head.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    said = {
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
        "draft_vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(said, indent=2) + "\n")


def _target(plan: HeadPlan) -> PreTrainedModel:
    target: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        resolve_model(plan.target), dtype=torch.bfloat16, local_files_only=True
    )
    return target.to(plan.device)


def main() -> None:
    """Parse the command line and train."""
    options = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(options.threads)
    options.work_dir.mkdir(parents=True, exist_ok=True)
    plan = HeadPlan(
        options.target, options.data, options.held_out, options.work_dir, options.out, options.minutes, options.device
    )
    try:
        {"eagle3": train_eagle3}[options.method](plan)
    except Stopped as stop:
        log.warning("%s", stop)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=("eagle3",))
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--work-dir", type=Path, default=Path("work"))
    parser.add_argument("--out", type=Path, required=True)
    return parser


if __name__ == "__main__":
    main()
