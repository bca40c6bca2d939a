"""Run by the Python of `.venv-vllm`: a vLLM engine that generates for the requests on stdin, one batch after another.

stdin: {"engine": arguments of LLM, "batches": [[[prompt, sampling parameters], ...], ...]}. stdout: a line per batch,
{"outputs": [[token, ...], ...]}, at the end {"metrics": {name: value}}. It waits for a line on stdin before each batch
but the first.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
ENGINE = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 8, "enforce_eager": True}
"""In bfloat16, 5 of the tests' 24 prompts have other greedy tokens alone than in a batch of 8, without any drafts, on a
CPU with AMX: its kernels sum by the number of rows. In float32 none has."""


def main() -> None:
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM and the libraries below it print to stdout
    asked: dict[str, Any] = json.loads(sys.stdin.readline())
    if asked["engine"].get("tensor_parallel_size", 1) == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    def sampling(given: dict[str, Any]) -> SamplingParams:
        if "structured_outputs" in given:
            given = {**given, "structured_outputs": StructuredOutputsParams(**given["structured_outputs"])}
        return SamplingParams(**given)

    llm = LLM(**{**ENGINE, "disable_log_stats": False, **asked["engine"]})
    for number, batch in enumerate(asked["batches"]):
        if number:
            sys.stdin.readline()
        prompts, params = zip(*batch, strict=True)
        answers = llm.generate(list(prompts), [sampling(each) for each in params], use_tqdm=False)
        print(json.dumps({"outputs": [list(answer.outputs[0].token_ids) for answer in answers]}), file=results)
    values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    print(json.dumps({"metrics": values}), file=results)


if __name__ == "__main__":
    main()
