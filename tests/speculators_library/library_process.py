"""Run by a Python that has `speculators`: it writes a head for each case, loads it again and asks for its guesses.

Arguments: the target's folder, the folder to write to. The last line of stdout is JSON: by case `config`, config.json;
`tensors`, the shape and dtype of each; `guesses`, by prompt length the paths that are asked about, each with the
likeliest next tokens and their log-probabilities.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, PretrainedConfig, Qwen3Config

from tests.speculators_library import cases
from tests.speculators_library.cases import BLOCK, CASES, DEPTH, Case

SHOWN = 6
"""Tokens recorded after a path."""
NO_LOSS: Any = (torch.zeros(()), {})
"""In place of what a training computes from logits."""


def decoder(case: Case) -> PretrainedConfig:
    """As the package's `create_transformer_layer_config` makes it."""
    types = ["full_attention" if n in case.full else "sliding_attention" for n in range(case.layers)]
    return {"qwen3": Qwen3Config, "llama": LlamaConfig}[case.decoder](
        vocab_size=cases.VOCABULARY,
        hidden_size=cases.HIDDEN,
        intermediate_size=cases.INNER,
        num_hidden_layers=case.layers,
        num_attention_heads=cases.HEADS,
        num_key_value_heads=cases.KV_HEADS,
        head_dim=cases.HEAD_DIM,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        sliding_window=cases.WINDOW,
        use_sliding_window="sliding_attention" in types,
        layer_types=types,
        rope_parameters={"rope_type": "default", "rope_theta": case.theta},
    )


def write(case: Case, target: Path, folder: Path) -> None:
    if case.kind == "mtp":
        proposal = GreedyTokenProposalConfig(speculative_tokens=1)
        config = MTPSpeculatorConfig(
            transformer_layer_config=AutoConfig.from_pretrained(target),
            speculators_config=SpeculatorsConfig(
                algorithm="mtp",
                proposal_methods=[proposal],
                default_proposal_method="greedy",
                verifier=VerifierConfig.from_pretrained(str(target)),
            ),
        )
        model: Any = MTPDraftModel(config)
        model.load_verifier_weights()
    else:
        ids = cases.vocabulary() if case.reduced else {"d2t": None, "t2d": None}
        model = SpeculatorModel.registry[case.kind].from_training_args(
            decoder(case),
            verifier_name_or_path=str(target),
            draft_vocab_size=len(cases.DRAFT_TOKENS) if case.reduced else cases.VOCABULARY,
            draft_attn_impl="eager",
            **ids,
            **case.options,
        )
    own = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    own |= {"lm_head.weight"} if case.kind in ("eagle3", "peagle") or case.reduced else set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in own:
                parameter.copy_(cases.numbers(name, parameter.shape))
    model.save_pretrained(folder)


def load(folder: Path) -> Any:
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model: Any = SpeculatorModel.from_pretrained(folder, config=config).eval()
    if config.speculators_model_type == "xpress":
        # Not in the file, and `from_pretrained` does not set it: findings/speculators-xpress-causal-mask.sh.
        torch.tril(torch.ones(BLOCK, BLOCK), out=model.refiner_head.causal_tril)
    return model


@contextmanager
def arguments_of(owner: Any, name: str, result: Any = None) -> Iterator[list[Any]]:
    """The arguments of each call of this function, in order. `result`: what it returns instead of its own."""
    seen: list[Any] = []
    original = getattr(owner, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return original(*args, **kwargs) if result is None else result

    with mock.patch.object(owner, name, noted):
        yield seen


def library_module(model: Any) -> Any:
    return sys.modules[type(model).__module__]


class Rows:
    """What a model says after the root and after each token of a path, [path + 1, columns]."""

    def __init__(self, model: Any, tokens: Sequence[int], path: Sequence[int]) -> None:
        self.model, self.root, self.count = model, len(tokens) - 1, len(path) + 1
        self.ids = torch.tensor([[*tokens, *path, *[0] * (BLOCK + 2)]])
        layers = len(model.target_layer_ids)
        known = cases.states(self.root, layers)
        self.hidden = torch.full((1, self.ids.shape[1], layers * cases.HIDDEN), 0.5)  # later ones are not seen
        self.hidden[0, : self.root] = known.flatten(1)
        self.last = torch.zeros(1, self.ids.shape[1], cases.HIDDEN)

    def logits(self) -> Tensor:
        return getattr(self, self.model.config.speculators_model_type)()

    def shifted(self) -> dict[str, Tensor]:
        """As the package's `shift_batch` pairs tokens and states."""
        ids = self.ids[:, 1:]
        return {"input_ids": ids, "hidden_states": self.hidden[:, :-1], "document_ids": torch.zeros_like(ids)}

    def eagle3(self) -> Tensor:
        with arguments_of(self.model.lm_head, "forward") as calls:
            self.model(**self.shifted(), ttt_steps=self.count)
        finals = torch.stack([args[0][0, self.root - 1] for args, _ in calls])
        return self.model.lm_head(finals)

    def peagle(self) -> Tensor:
        """The rows that are sampled are random: until all of the root's are among them."""
        inputs = self.shifted() | {"verifier_last_hidden_states": self.last[:, 1:]}
        ratios = {"down_sample_ratio": 0.95, "down_sample_ratio_min": 0.5}
        for seed in range(1000):
            torch.manual_seed(seed)
            with arguments_of(library_module(self.model), "compute_metrics", NO_LOSS) as calls:
                self.model(**inputs, **ratios, num_depths=self.count)
            [(_, named)] = calls
            rows = (named["anchor_pos"] == self.root - 1).nonzero()[:, 0]
            if named["depth"][rows].tolist() == list(range(self.count)):
                return named["logits"][0, rows]
        raise ValueError("no seed samples all rows of the root")

    def mtp(self) -> Tensor:
        """Of the root alone, see `guesses`."""
        logits, _, _ = self.model(input_ids=self.ids, hidden_states=self.hidden)
        return logits[0][0, self.root - 1][None]

    def anchored(self) -> Any:
        """The logits of one block, at the root, from which the package computes its loss."""
        loss_mask = torch.zeros_like(self.ids)
        loss_mask[0, self.root] = 1
        with arguments_of(library_module(self.model), "compute_metrics", NO_LOSS) as calls:
            self.model(
                hidden_states=self.hidden,
                input_ids=self.ids,
                loss_mask=loss_mask,
                verifier_last_hidden_states=self.last,
                document_ids=torch.zeros_like(self.ids),
                max_anchors=1,
            )
        args, named = calls[0]
        return named["unary_logits"] if "unary_logits" in named else args[0]

    def block(self, logits: Tensor) -> Tensor:
        first = 0 if self.model.config.sample_from_anchor else 1
        return logits[0, first : first + self.count]

    def dflash(self) -> Tensor:
        return self.block(self.anchored())

    dspark = xpress = dflash

    def dflash2(self) -> Tensor:
        """The selector's scores of its candidates: all others cannot be guessed."""
        selector = self.model.candidate_selector
        with arguments_of(selector, "score_candidates") as calls:
            self.anchored()
        unary, hidden, predecessors, _ = calls[0][0]
        candidates, scores = selector.select(unary, hidden, predecessors)
        return self.block(torch.full_like(unary, -torch.inf).scatter(-1, candidates, scores))


@torch.no_grad()
def guesses(model: Any, case: Case, tokens: Sequence[int]) -> list[Any]:
    """Along the likeliest path, and along the one that begins with the second token."""
    columns = cases.DRAFT_TOKENS if case.reduced else range(cases.VOCABULARY)
    # A second step of the package's MTP computes all rows again from its own outputs, where servers keep those of the
    # target's states; and its sliding EAGLE-3 counts the window from the root, where servers count it from each row.
    root_alone = case.kind == "mtp" or (case.kind == "eagle3" and len(case.full) < case.layers)
    depth = 1 if root_alone else DEPTH
    asked = []
    for first in (0, 1):
        path: list[int] = []
        while len(path) < depth:
            log_probs = Rows(model, tokens, path).logits().log_softmax(-1)[-1]
            best = [i for i in log_probs.topk(SHOWN).indices.tolist() if log_probs[i] > -torch.inf]
            if path or not first:
                asked.append([list(path), [[columns[i], round(float(log_probs[i]), 5)] for i in best]])
            path.append(columns[best[0 if path else first]])
    return asked


def main(target: Path, folder: Path) -> None:
    recorded = {}
    for name, case in CASES.items():
        head = folder / name.replace(", ", "_").replace(" ", "-")
        write(case, target, head)
        with safe_open(head / "model.safetensors", "pt") as file:
            slices = {key: file.get_slice(key) for key in sorted(file.keys())}
            tensors = {key: [each.get_shape(), each.get_dtype()] for key, each in slices.items()}
        entry: dict[str, Any] = {"config": json.loads((head / "config.json").read_text()), "tensors": tensors}
        model = load(head)
        entry["guesses"] = {n: guesses(model, case, cases.prompt(n)) for n in cases.PROMPTS}
        recorded[name] = entry
    print(json.dumps({"speculators": version("speculators"), "heads": recorded}))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
