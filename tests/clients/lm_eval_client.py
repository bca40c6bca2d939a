"""lm-eval's backends for servers, compared with its backend for transformers on the same weights in float32."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import lm_eval
import pytest
from datasets import Dataset
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from tests.clients.asked import MODEL, URL

FOLDER = os.environ["PACELINE_MODEL"]
TOLERANCE = 1e-3
"""Nats per token."""
QUESTIONS = [
    {"asked": "json.dumps(obj) serializes obj to", "choices": [" a JSON formatted str", " a list of bytes"]},
    {"asked": "os.getcwd() returns", "choices": [" the current working directory", " an umbrella", " 東京"]},
    {"asked": "def read_lines(path):\n", "choices": ["    with open(path) as f:\n        return f.readlines()\n", "x"]},
    {"asked": "The re module provides", "choices": [" regular expression matching operations", " fish"]},
]
CHOICE: dict[str, Any] = {
    "task": "choice",
    "custom_dataset": lambda **_: {"test": Dataset.from_list(QUESTIONS)},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{asked}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": 0,
    "target_delimiter": "",
}
ROLLING: dict[str, Any] = {
    "task": "rolling",
    "custom_dataset": CHOICE["custom_dataset"],
    "test_split": "test",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{asked}}{{choices[0]}}",
    "metric_list": [{"metric": "bits_per_byte"}],
}
WRITTEN: dict[str, Any] = {
    "task": "written",
    "custom_dataset": CHOICE["custom_dataset"],
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{asked}}",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24},
    "metric_list": [{"metric": "exact_match"}],
}
SERVER = f"model={MODEL},tokenizer={FOLDER},tokenizer_backend=huggingface,num_concurrent=4,max_retries=1"
COMPLETIONS = ("local-completions", f"{SERVER},base_url={URL}/v1/completions")
CHATS = ("local-chat-completions", f"{SERVER},base_url={URL}/v1/chat/completions")
TRANSFORMERS = ("hf", f"pretrained={FOLDER},dtype=float32")


def samples(backend: tuple[str, str], task: dict[str, Any], **options: Any) -> list[Any]:
    """What the backend returned for each request of the task, in the order of requests."""
    model, arguments = backend
    device = {"device": "cpu"} if model == "hf" else {}
    results = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=[task], task_manager=manager(), bootstrap_iters=0, **device, **options
    )
    assert results is not None
    found = sorted(results["samples"][task["task"]], key=lambda sample: sample["doc_id"])
    return [response[0] for sample in found for response in sample["resps"]]


@cache
def manager() -> TaskManager:
    return TaskManager()


def lengths(texts: list[str]) -> list[int]:
    """In tokens."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    return [len(tokenizer.encode(text)) for text in texts]


def test_log_likelihoods_are_those_of_transformers() -> None:
    served, expected = samples(COMPLETIONS, CHOICE), samples(TRANSFORMERS, CHOICE)
    counts = lengths([choice for each in QUESTIONS for choice in each["choices"]])
    assert len(served) == len(expected) == len(counts)
    for (score, greedy), (wanted, wanted_greedy), tokens in zip(served, expected, counts, strict=True):
        assert score == pytest.approx(wanted, abs=TOLERANCE * tokens)
        assert greedy == wanted_greedy


def test_rolling_log_likelihoods_are_those_of_transformers() -> None:
    served, expected = samples(COMPLETIONS, ROLLING), samples(TRANSFORMERS, ROLLING)
    counts = lengths([f"{each['asked']}{each['choices'][0]}" for each in QUESTIONS])
    for score, wanted, tokens in zip(served, expected, counts, strict=True):
        assert score == pytest.approx(wanted, abs=TOLERANCE * tokens)


def test_completions_are_those_of_transformers() -> None:
    assert samples(COMPLETIONS, WRITTEN) == samples(TRANSFORMERS, WRITTEN)


def test_chats_are_those_of_transformers() -> None:
    served = samples(CHATS, WRITTEN, apply_chat_template=True)
    assert served == samples(TRANSFORMERS, WRITTEN, apply_chat_template=True)


def test_speculation_changes_nothing() -> None:
    plain = {**WRITTEN, "generation_kwargs": {**WRITTEN["generation_kwargs"], "speculative": False}}
    assert samples(COMPLETIONS, WRITTEN) == samples(COMPLETIONS, plain)
