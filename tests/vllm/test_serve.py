"""`vllm serve` with `RemoteDrafts` and nothing else of ours but a draft worker, as docs/vllm.md says."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from paceline.cli.deployment import free_ports
from paceline.launcher import die_with_parent
from paceline.text import Tokenizer
from tests.vllm.engines import CORE, DEPTH, PROMPTS, PYTHON, TARGET, draft, generate

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SPECULATION = {"method": "custom_class", "model": "paceline.vllm.RemoteDrafts", "num_speculative_tokens": DEPTH}
TOKENS = 32


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Its address."""
    [port] = free_ports("127.0.0.1", 0, 1)[1]
    with draft() as worker:
        settings = {
            "PACELINE_DRAFTS": worker.address,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": CORE,
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
        options = ["--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "8", "--enforce-eager"]
        names = ["--served-model-name", "pydoc", "--host", "127.0.0.1", "--port", str(port)]
        # Not `vllm serve`: it looks for a package of its own name, and the one for CPUs has another.
        serve = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", TARGET]
        command = [*serve, *options, *names, "--speculative-config", json.dumps(SPECULATION)]
        with subprocess.Popen(die_with_parent(command), env={**os.environ, **settings}) as process:
            try:
                url = f"http://127.0.0.1:{port}"
                wait_until_healthy(url, process)
                yield url
            finally:
                process.terminate()
                process.wait(30)


def wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise AssertionError("vLLM has ended")


def test_streams_have_the_text_of_plain_decoding(server: str) -> None:
    greedy = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
    plain, _ = generate([(prompt, greedy) for prompt in PROMPTS[:8]])
    tokenizer = Tokenizer.load("pydoc")
    with httpx.Client(trust_env=False) as http:
        client = openai.OpenAI(base_url=f"{server}/v1", api_key="-", http_client=http)
        for prompt, tokens in zip(PROMPTS, plain, strict=False):
            stream = client.completions.create(
                model="pydoc",
                prompt=prompt,
                temperature=0.0,
                max_tokens=TOKENS,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            assert "".join(chunk.choices[0].text for chunk in stream) == tokenizer.decode(tokens)
        metrics = http.get(f"{server}/metrics").text
    accepted = [line for line in metrics.splitlines() if line.startswith("vllm:spec_decode_num_accepted_tokens_total")]
    assert float(accepted[0].split()[-1]) > 0
