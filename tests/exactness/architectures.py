"""`make models`: which of transformers' causal language models are computed here as transformers computes them.

Each is tiny and random, in float32, and continues three prompts, the longest longer than any window, greedily and
sampled: alone, together, and with guesses half of which are wrong. Then transformers' eager attention gets prompt and
output at once, and must give the same tokens. The last line is JSON: how many architectures were tried, and how many
are equal, refused or wrong; the lines before it name them. Exit code 1 if any is wrong.
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
from paceline.core.logits_rules import History, SamplingRow
from paceline.core.policy.step_cost import RowCost
from paceline.core.sampling import scores
from paceline.core.tree import ROOT, TokenTree
from paceline.drafting.speculator import Opening
from paceline.engine.draft_client import DraftClient, LocalDraftClient, NoDraftClient
from paceline.engine.engine import Engine
from paceline.messages import GenerationRequest
from paceline.model.loading import build
from paceline.model.model import Model
from tests.helpers.engine_runs import run
from tests.helpers.replicas import Replicas

VOCABULARY = 128
LONGEST = 256
"""Positions."""
WINDOW = 16
LARGEST = 4_000_000
"""Parameters."""
OUTPUT = 10
"""Tokens."""
CLOSE = 1e-3
"""Another token may be drawn if its score is this close to the largest: sums have another order."""
TINY: Mapping[str, Any] = {
    name: value
    for value, names in (
        (VOCABULARY, "vocab_size vocab_size_per_layer_input"),
        (64, "hidden_size n_embd d_model embedding_size dim_model"),
        (
            2,
            "num_hidden_layers num_layers n_layer n_layers num_key_value_heads decoder_layers encoder_layers "
            "num_experts_per_tok eos_token_id",
        ),
        (
            4,
            "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
            "num_experts num_local_experts n_routed_experts",
        ),
        (16, "head_dim kv_channels dim_head hidden_size_per_layer_input kv_lora_rank qk_nope_head_dim v_head_dim"),
        (8, "rotary_dim qk_rope_head_dim"),
        (96, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dim_ff ffn_hidden_size"),
        (32, "moe_intermediate_size shared_expert_intermediate_size q_lora_rank"),
        (1, "n_shared_experts num_shared_experts n_group topk_group first_k_dense_replace bos_token_id"),
        (LONGEST, "max_position_embeddings n_positions n_ctx max_seq_len seq_length"),
        (WINDOW, "sliding_window attention_window"),
        (0.2, "initializer_range init_std"),
        (True, "is_decoder"),
        (False, "use_cache"),
        (0, "pad_token_id"),
    )
    for name in names.split()
}
"""Settings by their names in transformers' configurations, each of which has some of them."""
MIXED = ["linear_attention", "full_attention"]
OWN: Mapping[str, Mapping[str, Any]] = {
    **{name: {"layer_types": MIXED} for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "bailing_hybrid")},
    **{name: {"layer_types": ["conv", "full_attention"]} for name in ("lfm2", "lfm2_moe", "lfm3")},
    "kimi_linear": {"layer_types": MIXED, "linear_num_heads": 4, "linear_head_dim": 16},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8},
    "phi3": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
}
"""Settings of single architectures."""


@dataclass(frozen=True, slots=True)
class Verdict:
    architecture: str
    what: str
    """"equal", "refused", "wrong" or "untried"."""
    why: str = ""


class Oracle(Replicas):
    """Guesses an earlier output and a wrong sibling of each token; every third step the wrong one alone."""

    def __init__(self, outputs: Mapping[tuple[int, ...], Sequence[int]]) -> None:
        """`outputs`: by prompt."""
        super().__init__()
        self._outputs = outputs
        self._texts: dict[int, Sequence[int]] = {}

    def open(self, opening: Opening) -> None:
        super().open(opening)
        prompt = tuple(opening.tokens)
        self._texts[opening.request_id] = [*prompt, *self._outputs.get(prompt, ())]

    def guesses(self, request_id: int, tree: TokenTree) -> Iterator[int]:
        parent = ROOT
        for token in self._texts[request_id][tree.position + 1 : tree.position + 4]:
            wrong = (token + 1) % VOCABULARY
            for guess in (wrong,) if tree.position % 3 == 0 else (wrong, token):
                if tree.child(parent, guess) is None:
                    yield tree.add(parent, guess, -0.1)
            child = tree.child(parent, token)
            if child is None:
                return
            parent = child


def tiny(architecture: str) -> PreTrainedModel:
    """A random network, in float32. Raises an error of any kind if there is none with these settings."""
    kind = CONFIG_MAPPING[architecture]
    known = {*kind().to_dict(), *kind.attribute_map}
    if "qk_rope_head_dim" in known:  # latent attention's rotary size is also called head_dim
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
    return network


def requests() -> list[GenerationRequest]:
    rng = random.Random(2)
    prompts = [rng.choices(range(3, VOCABULARY), k=size) for size in (5, 2 * WINDOW + 9, 70)]
    return [
        GenerationRequest(
            f"{i}-{temperature}", [*prompt, last], SamplingParams(temperature=temperature, seed=7, max_tokens=OUTPUT)
        )
        for i, prompt in enumerate(prompts)
        for last, temperature in ((3, 0.0), (4, 0.9))
    ]


def judge(architecture: str) -> Verdict:
    try:
        network = tiny(architecture)
    except Exception as error:  # noqa: BLE001 - some architectures need settings of their own, or a package
        return Verdict(architecture, "untried", f"{type(error).__name__}: {error}".partition("\n")[0])
    try:
        return _judged(architecture, network)
    except Exception as error:  # noqa: BLE001 - any failure should have been a refusal
        return Verdict(architecture, "wrong", f"{type(error).__name__}: {error}")


def _judged(architecture: str, network: PreTrainedModel) -> Verdict:
    try:
        model = build(copy.deepcopy(network), architecture, EngineConfig(slots=1024, max_model_len=LONGEST), "", [])
    except ValueError as error:
        return Verdict(architecture, "refused", str(error))
    generation_requests = requests()
    alone: dict[str, list[int]] = {}
    for request in generation_requests:
        alone |= _outputs(model, [request], NoDraftClient())
    oracle = Oracle({tuple(request.prompt): alone[request.request_id] for request in generation_requests})
    for way, drafting in (("together", NoDraftClient()), ("with guesses", LocalDraftClient(oracle))):
        if _outputs(model, generation_requests, drafting) != alone:
            return Verdict(architecture, "wrong", f"other tokens {way}")
    for request in generation_requests:
        if at := _differs(network, request, alone[request.request_id]):
            why = f"transformers draws another token: request {request.request_id} {at}"
            return Verdict(architecture, "wrong", why)
    return Verdict(architecture, "equal")


def _outputs(
    model: Model, generation_requests: Sequence[GenerationRequest], drafting: DraftClient
) -> dict[str, list[int]]:
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    config = EngineConfig(slots=1024, max_num_batched_rows=24, enable_prefix_caching=False)
    engine = Engine(model, config, speculation, drafting, RowCost([8, 256], [1.0, 1.001]))
    results = run(engine, generation_requests)
    if errors := [each.error for each in results.values() if each.error]:
        raise ValueError(errors[0])
    return {name: each.tokens for name, each in results.items()}


def _differs(network: PreTrainedModel, request: GenerationRequest, output: Sequence[int]) -> str:
    """The first token that transformers' forward would not have drawn; empty: none."""
    text, start = [*request.prompt, *output], len(request.prompt)
    logits = _eager(network, text[:-1])[start - 1 :]
    history = History(request.sampling, request.prompt, (), VOCABULARY)
    rows = [SamplingRow(request.sampling, start + i, history, output[:i]) for i in range(len(output))]
    scored = scores(logits, rows)
    for i, (token, row) in enumerate(zip(output, scored, strict=True)):
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
    parser.add_argument("architectures", nargs="*", help="transformers' names; default: all")
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
