"""One engine in a process of its own, with requests as lines of JSON: `python peer_worker.py ENGINE`.

The first line on standard input is the setup:

    {"target": FOLDER, "draft": FOLDER, "head": FOLDER, "gguf": FILE, "threads": 2, "methods": ["plain", ...],
     "speculation": {METHOD: CONFIG, ...}}

The response is `{"ready": METHODS}`. Every further line requests new tokens of some prompts at once:

    {"method": "plain", "prompts": [[1, 2], ...], "temperature": 0.8, "seed": 7, "max_tokens": 96}

and gets `{"tokens": [[3, 4], ...], "seconds": 0.2}` with the seconds of the engine's own call, or `{"error": TEXT}`.
Every prompt draws with that seed. No engine reuses a prompt's KV, and none stops early: the checkpoints have no
end-of-text token; where they have (`"ends": true` in a setup for paceline), it is never drawn. `{"figures": true}`
requests what else the engine has measured: `{"figures": {NAME: VALUE, ...}}`.

This file runs in the engine's environment, where paceline may not be installed: its imports are inside functions.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

POSITIONS = 2048
"""Most positions of one request."""
MOST_AT_ONCE = 8
VLLM_KV_BYTES = 2**28
"""For MOST_AT_ONCE requests of POSITIONS positions, of the widened target and a draft. vLLM touches all of it."""
GUESSES = 5
"""Draft tokens of every vLLM method, as in the examples of its manual."""
LOOKED_UP = {"prompt_lookup": 10, "prompt_lookup_2": 2}
"""In llama-cpp-python's manual, 10 is the default, and 2 is better without a GPU."""

Setup = Mapping[str, Any]
Tokens = list[list[int]]
Generate = Callable[[Sequence[Sequence[int]], float, int, int], Tokens]
"""From prompts, temperature, seed and number of tokens to the new tokens of each prompt. Raises ValueError."""


class LoadedEngine(NamedTuple):
    """An engine that has loaded its models."""

    methods: Mapping[str, Generate]
    figures: Callable[[], dict[str, float]] = dict
    """What it has measured, beside the time of calls."""


def load_paceline(setup: Setup) -> LoadedEngine:
    """Every method drafts in this process over one loaded target, as configured in the setup's `speculation`."""
    from paceline.config import SamplingParams
    from paceline.llm import LLM

    engine = {"threads": setup["threads"], "slots": MOST_AT_ONCE * POSITIONS, "enable_prefix_caching": False}
    target = LLM(setup["target"], engine_config=engine)
    llms = {"plain": target}
    llms |= {name: target.with_speculation(config) for name, config in setup["speculation"].items()}

    def generating(name: str) -> Generate:
        def generate(prompts: Sequence[Sequence[int]], temperature: float, seed: int, count: int) -> Tokens:
            least = count if setup.get("ends") else 0
            sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=count, min_tokens=least)
            return [each.tokens for each in llms[name].generate(prompts, sampling, speculative=name != "plain")]

        return generate

    return LoadedEngine({name: generating(name) for name in llms})


def load_transformers(setup: Setup) -> LoadedEngine:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(setup["threads"])

    def loaded(path: str) -> Any:
        """A folder's model, or a GGUF file's, dequantised."""
        if not path.endswith(".gguf"):
            return AutoModelForCausalLM.from_pretrained(path, dtype="auto", local_files_only=True).eval()
        from paceline.model.loading import read_gguf
        from paceline.model.transformers_setup import model_config

        return read_gguf(Path(path), model_config(path), torch.bfloat16).eval()

    target = loaded(setup["target"])

    def generating(most: int, **options: Any) -> Generate:
        def generate(prompts: Sequence[Sequence[int]], temperature: float, seed: int, count: int) -> Tokens:
            _refuse_more(prompts, most)
            torch.manual_seed(seed)
            longest = max(map(len, prompts))
            ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
            mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
            sampling = (
                {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
            )
            output = target.generate(
                ids, attention_mask=mask, pad_token_id=0, max_new_tokens=count, **sampling, **options
            )
            return [[int(token) for token in row[longest:]] for row in output]

        return generate

    lookup = generating(1, prompt_lookup_num_tokens=LOOKED_UP["prompt_lookup"])
    methods = {"plain": generating(MOST_AT_ONCE), "prompt_lookup": lookup}
    if setup["draft"] is not None:
        methods["assisted"] = generating(1, assistant_model=loaded(setup["draft"]))
    return LoadedEngine(methods)


def load_llama_cpp(setup: Setup) -> LoadedEngine:
    from gguf_writer import write_gguf  # beside this file
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    path = Path(setup["gguf"])
    if not path.is_file():
        write_gguf(Path(setup["target"]), path)
    threads = setup["threads"]

    def looking_up(most: int) -> Generate:
        llama = Llama(
            str(path),
            n_ctx=POSITIONS,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=True,  # the default of llama.cpp
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=most),
            verbose=False,
        )

        def generate(prompts: Sequence[Sequence[int]], temperature: float, seed: int, count: int) -> Tokens:
            _refuse_more(prompts, 1)
            llama.reset()
            llama.set_seed(seed)
            stream = llama.generate(prompts[0], temp=temperature, top_k=0, top_p=1.0, min_p=0.0)
            return [[int(token) for token, _ in zip(stream, range(count), strict=False)]]

        return generate

    plain: dict[str, Generate] = {"plain": LlamaCppBatches(str(path), threads).generate}
    return LoadedEngine(
        plain | {name: looking_up(most) for name, most in LOOKED_UP.items() if name in setup["methods"]}
    )


class LlamaCppBatches:
    """llama.cpp's C functions for several sequences at once, which its Python class lacks."""

    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp

        self._lib = llama_cpp
        model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        self._contexts = {count: self._context(model, count, threads) for count in (1, MOST_AT_ONCE)}
        self._batch = llama_cpp.llama_batch_init(POSITIONS, 0, 1)

    def generate(self, prompts: Sequence[Sequence[int]], temperature: float, seed: int, count: int) -> Tokens:
        context = self._contexts[1 if len(prompts) == 1 else MOST_AT_ONCE]
        self._lib.llama_memory_clear(self._lib.llama_get_memory(context), True)
        samplers = [self._sampler(temperature, seed) for _ in prompts]
        tokens: Tokens = [[] for _ in prompts]
        for sequence, prompt in enumerate(prompts):
            self._decode(context, [(token, position, sequence) for position, token in enumerate(prompt)])
            tokens[sequence].append(self._lib.llama_sampler_sample(samplers[sequence], context, -1))
        for step in range(count - 1):
            rows = [
                (own[-1], len(prompt) + step, i) for i, (own, prompt) in enumerate(zip(tokens, prompts, strict=True))
            ]
            self._decode(context, rows, every=True)
            for row, own in enumerate(tokens):
                own.append(self._lib.llama_sampler_sample(samplers[row], context, row))
        for sampler in samplers:
            self._lib.llama_sampler_free(sampler)
        return tokens

    def _context(self, model: Any, sequences: int, threads: int) -> Any:
        params = self._lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = POSITIONS * sequences, sequences
        params.n_batch = POSITIONS
        params.n_threads = params.n_threads_batch = threads
        return self._lib.llama_init_from_model(model, params)

    def _sampler(self, temperature: float, seed: int) -> Any:
        chain = self._lib.llama_sampler_chain_init(self._lib.llama_sampler_chain_default_params())
        if temperature:
            self._lib.llama_sampler_chain_add(chain, self._lib.llama_sampler_init_temp(temperature))
            self._lib.llama_sampler_chain_add(chain, self._lib.llama_sampler_init_dist(seed))
        else:
            self._lib.llama_sampler_chain_add(chain, self._lib.llama_sampler_init_greedy())
        return chain

    def _decode(self, context: Any, rows: Sequence[tuple[int, int, int]], *, every: bool = False) -> None:
        """`rows`: token, position and sequence of each. Logits are computed for the last one, or for every one."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = every or i == len(rows) - 1
        if code := self._lib.llama_decode(context, batch):
            raise ValueError(f"llama_decode gave {code}")


def load_vllm(setup: Setup) -> LoadedEngine:
    """One method: each needs an engine of its own. `engine_args` of the setup: more arguments of it. `vllm_method`: how
    it drafts, if it is not named so."""
    from vllm import LLM, SamplingParams

    [method] = setup["methods"]
    methods: dict[str, dict[str, Any]] = {
        "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
        "draft_model": {"method": "draft_model", "model": setup["draft"]},
        "eagle3": {"method": "eagle3", "model": setup["head"]},
        "pool": {"method": "custom_class", "model": "paceline.vllm.RemoteDrafts"},
    }
    name = setup.get("vllm_method", method)
    config = None if name == "plain" else methods[name]
    llm = LLM(
        setup["target"],
        dtype="bfloat16",
        max_model_len=POSITIONS,
        max_num_seqs=MOST_AT_ONCE,
        kv_cache_memory_bytes=VLLM_KV_BYTES,
        enable_prefix_caching=False,
        speculative_config=config and {**config, "num_speculative_tokens": GUESSES},
        **setup.get("engine_args", {}),
    )

    def generate(prompts: Sequence[Sequence[int]], temperature: float, seed: int, count: int) -> Tokens:
        sampling = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=count, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [list(each.outputs[0].token_ids) for each in llm.generate(inputs, sampling, use_tqdm=False)]

    def propose_ms() -> dict[str, float]:
        [value] = llm.collective_rpc(lambda worker: worker.model_runner.drafter.propose_ms)
        return {"propose_ms": value}

    return LoadedEngine({method: generate}, propose_ms if name == "pool" else dict)


def _refuse_more(prompts: Sequence[Sequence[int]], most: int) -> None:
    if len(prompts) > most:
        raise ValueError(f"it takes {most} at once")


LOADERS: Mapping[str, Callable[[Setup], LoadedEngine]] = {
    "paceline": load_paceline,
    "transformers": load_transformers,
    "llama.cpp": load_llama_cpp,
    "vllm": load_vllm,
}


def serve(load: Callable[[Setup], LoadedEngine], requests: TextIO, responses: TextIO) -> None:
    """Answer line by line until the input ends."""

    def respond(line: dict[str, Any]) -> None:
        print(json.dumps(line), file=responses, flush=True)

    try:
        engine = load(json.loads(requests.readline()))
    except Exception as error:
        respond({"error": f"{type(error).__name__}: {error}"})
        raise
    respond({"ready": list(engine.methods)})
    for line in requests:
        request = json.loads(line)
        if "figures" in request:
            respond({"figures": engine.figures()})
            continue
        began = time.perf_counter()
        try:
            sampling = request["temperature"], request["seed"], request["max_tokens"]
            tokens = engine.methods[request["method"]](request["prompts"], *sampling)
            respond({"tokens": tokens, "seconds": time.perf_counter() - began})
        except Exception as error:  # noqa: BLE001 - the next request may succeed
            respond({"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the engine is no response
    serve(LOADERS[sys.argv[1]], sys.stdin, responses)


if __name__ == "__main__":
    main()
