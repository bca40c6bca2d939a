"""`make models`: which of transformers' causal language models are computed here as transformers computes them.

Each is made tiny and random, in float32, and answers three prompts, the longest longer than any window, greedily and by
drawing: alone, together, and with guesses half of which are wrong. Then transformers' own plain formulas are given
prompt and answer at once, and have to draw the same tokens. The last line is JSON: how many were tried, how many are
equal, refused with a sentence, or wrong; the lines before it say which. Exit code 1 if any is wrong.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import random
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from paceline.config import EngineConfig, SamplingParams, SpeculativeConfig
from paceline.core.growth import Growth
from paceline.core.messages import Submission
from paceline.core.policy.step_cost import RowCost
from paceline.core.sampling import History, SamplingRow, scores
from paceline.core.tree import ROOT, TokenTree
from paceline.drafting.speculator import Commit, Opening, Speculator
from paceline.engine.draft_client import DraftClient, LocalDraftClient, NoDraftClient
from paceline.engine.engine import Engine
from paceline.model.loading import build
from paceline.model.model import Model

VOCABULARY = 128
LONGEST = 256
"""Positions."""
WINDOW = 16
LARGEST = 4_000_000
"""Parameters."""
ANSWER = 10
"""Tokens."""
CLOSE = 1e-3
"""Another token may be drawn where its score is so close to the largest: sums are made in another order."""
TINY: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "embedding_size": 64,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "kv_channels": 16,
    "rotary_dim": 8,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "dim_ff": 96,
    "dim_model": 64,
    "dim_head": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "ffn_hidden_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "max_position_embeddings": LONGEST,
    "n_positions": LONGEST,
    "n_ctx": LONGEST,
    "max_seq_len": LONGEST,
    "seq_length": LONGEST,
    "sliding_window": WINDOW,
    "attention_window": WINDOW,
    "initializer_range": 0.2,
    "init_std": 0.2,
    "is_decoder": True,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Settings by their names in transformers' configurations; each has some of them."""
OWN: Mapping[str, Mapping[str, Any]] = {
    "phi3": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
}
"""Of single architectures."""


class NotTinyError(Exception):
    """No tiny network of this architecture was made; the text says why."""


@dataclass(frozen=True, slots=True)
class Verdict:
    architecture: str
    what: str
    """"equal", "refused", "wrong" or "untried"."""
    why: str = ""


class Oracle(Speculator):
    """Guesses what was answered before, and beside each such guess another token; every third guess is that alone."""

    method = "custom"

    def __init__(self, answers: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        """`answers`: by prompt."""
        self._answers = answers
        self._trees: dict[int, tuple[TokenTree, Sequence[int]]] = {}

    def open(self, opening: Opening) -> None:
        tree = TokenTree(len(opening.tokens) - 1, opening.tokens[-1])
        prompt = tuple(opening.tokens)
        self._trees[opening.request_id] = tree, [*prompt, *self._answers.get(prompt, ())]

    def commit(self, commit: Commit) -> None:
        self._trees[commit.request_id][0].commit(commit.tokens)

    def close(self, request_id: int) -> None:
        self._trees.pop(request_id, None)

    def grow(self) -> dict[int, Growth]:
        return {key: tree.growth(list(self._guess(tree, text))) for key, (tree, text) in self._trees.items()}

    def _guess(self, tree: TokenTree, text: Sequence[int]) -> Iterator[int]:
        parent = ROOT
        for token in text[tree.position + 1 : tree.position + 4]:
            wrong = (token + 1) % VOCABULARY
            for guess in (wrong,) if tree.position % 3 == 0 else (wrong, token):
                if tree.child(parent, guess) is None:
                    yield tree.add(parent, guess, -0.1)
            child = tree.child(parent, token)
            if child is None:
                return
            parent = child


def tiny(architecture: str) -> PreTrainedModel:
    """A random network, in float32. Raises `NotTinyError`."""
    kind = CONFIG_MAPPING[architecture]
    try:
        known = {*kind().to_dict(), *kind.attribute_map}
        if "qk_rope_head_dim" in known:  # what rotary embeddings of latent attention turn is called a head's size, too
            known.discard("head_dim")
        settings = {name: value for name, value in TINY.items() if name in known}
        if "kv_lora_rank" in known:  # every head has a key of its own
            settings["num_key_value_heads"] = settings["num_attention_heads"]
        config = kind(**{**settings, **OWN.get(architecture, {})})
        with torch.device("meta"):
            parameters = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
        if parameters > LARGEST:
            raise ValueError(f"{parameters:,} parameters with these settings")
        torch.manual_seed(3)
        network: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        network = network.float().eval().requires_grad_(False)
        _eager(network, [1, 2, 3])
    except Exception as error:
        raise NotTinyError(f"{type(error).__name__}: {error}".partition("\n")[0]) from error
    return network


def requests() -> list[Submission]:
    rng = random.Random(2)
    prompts = [rng.choices(range(3, VOCABULARY), k=size) for size in (5, 2 * WINDOW + 9, 70)]
    laws = (
        SamplingParams(temperature=0.0, max_tokens=ANSWER),
        SamplingParams(temperature=0.9, seed=7, max_tokens=ANSWER),
    )
    return [
        Submission(f"{i}-{law.temperature}", [*prompt, 3 + j], law)
        for i, prompt in enumerate(prompts)
        for j, law in enumerate(laws)
    ]


def judge(architecture: str) -> Verdict:
    try:
        network = tiny(architecture)
    except NotTinyError as error:
        return Verdict(architecture, "untried", str(error))
    try:
        return _judged(architecture, network)
    except Exception as error:  # noqa: BLE001 - whatever it is, it was to be refused with a sentence
        return Verdict(architecture, "wrong", f"{type(error).__name__}: {error}")


def _judged(architecture: str, network: PreTrainedModel) -> Verdict:
    try:
        model = build(copy.deepcopy(network), architecture, EngineConfig(slots=1024, max_model_len=LONGEST), "", [])
    except ValueError as error:
        return Verdict(architecture, "refused", str(error))
    asked = requests()
    alone: dict[str, list[int]] = {}
    for request in asked:
        alone |= _answers(model, [request], NoDraftClient())
    together = _answers(model, asked, NoDraftClient())
    oracle = Oracle({tuple(request.prompt): alone[request.request_id] for request in asked})
    guessed = _answers(model, asked, LocalDraftClient(oracle))
    for way, answers in (("together", together), ("with guesses", guessed)):
        if answers != alone:
            return Verdict(architecture, "wrong", f"other tokens {way}")
    for request in asked:
        if at := _differs(network, request, alone[request.request_id]):
            return Verdict(
                architecture, "wrong", f"transformers draws another token: request {request.request_id} {at}"
            )
    return Verdict(architecture, "equal")


def _answers(model: Model, asked: Sequence[Submission], drafting: DraftClient) -> dict[str, list[int]]:
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    config = EngineConfig(slots=1024, max_num_batched_rows=24, enable_prefix_caching=False)
    engine = Engine(model, config, speculation, drafting, RowCost([8, 256], [1.0, 1.001]))
    for request in asked:
        engine.submit(request)
    answers: dict[str, list[int]] = {request.request_id: [] for request in asked}
    while engine.busy:
        for delta in engine.step():
            if delta.error:
                raise ValueError(delta.error)
            answers[delta.request_id] += delta.tokens
    return answers


def _differs(network: PreTrainedModel, request: Submission, answer: Sequence[int]) -> str:
    """Where transformers' own forward would not have drawn what was answered; empty: nowhere."""
    text, start = [*request.prompt, *answer], len(request.prompt)
    logits = _eager(network, text[:-1])[start - 1 :]
    history = History(request.sampling, request.prompt, (), VOCABULARY)
    rows = [SamplingRow(request.sampling, start + i, history, answer[:i]) for i in range(len(answer))]
    scored = scores(logits, rows)
    for i, (token, row) in enumerate(zip(answer, scored, strict=True)):
        behind = float(row.max() - row[token])
        if not behind <= CLOSE * max(1.0, float(logits[i].abs().max())):
            return f"at {i}, by {behind:.2g}"
    return ""


@torch.inference_mode()
def _eager(network: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    logits: torch.Tensor = network(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()
    return logits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", help="transformers' names of them; all, if none is given")
    chosen = parser.parse_args().architectures or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    verdicts = []
    for architecture in chosen:
        verdicts.append(judge(architecture))
        print(f"{architecture}: {verdicts[-1].what} {verdicts[-1].why}".rstrip(), flush=True)
    count = {what: sum(each.what == what for each in verdicts) for what in ("equal", "refused", "wrong", "untried")}
    tried = len(verdicts) - count.pop("untried")
    print(json.dumps({"architectures": tried, **count}))
    return int(bool(count["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
