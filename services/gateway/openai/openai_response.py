"""Deltas as OpenAI's response objects: whole, or as the chunks of a stream.

A stream has, for chat, a first chunk with the role; a chunk for each delta with text; a chunk with the finish reason
for each completion; and if asked for, a chunk with the usage. Statistics are in the very last chunk.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.core.messages import Delta, GenerationRequest, VerifiedTree
from paceline_services.gateway.openai.bodies import CompletionBody, GenerationBody
from paceline_services.gateway.openai.logprobs import chat_log_probs, completion_log_probs, spelled
from paceline_services.gateway.openai.usage import RequestUsage
from paceline_services.gateway.served_model import ServedModel

Json = dict[str, Any]


class OpenAIResponse(ABC):
    """The response to one HTTP request, built once from the deltas of its completions: whole or streamed."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, body: GenerationBody, requests: Sequence[GenerationRequest], model: ServedModel) -> None:
        self.streamed = bool(body.stream)
        self._requests = requests
        self._tokenizer = model.tokenizer
        self._usage = RequestUsage(requests, body.choices)
        self._options = body.stream_options
        self._reports = body.speculation_stats
        self._return_token_ids = body.return_token_ids
        self._return_accepted = body.return_accepted
        self._return_tree = body.return_tree
        self._return_logprobs = body.top_log_probs is not None
        self._envelope: Json = {
            "id": f"{self.id_prefix}-{requests[0].group}",
            "object": self.chunk_object,
            "created": int(time.time()),
            "model": model.model,
            "system_fingerprint": f"fp_{model.tokenizer.fingerprint[:12]}",
        }

    def response(self, outputs: Sequence[Delta]) -> Json:
        """The response object, from the whole output of each completion."""
        entries = []
        for index, output in enumerate(outputs):
            self._usage.add(index, output)
            end = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
            entries.append(self._entry(index, self.message(index, output.text), output) | end)
        response = {"object": self.whole_object, "choices": entries, "usage": self._usage.usage()}
        return self._envelope | response | self._statistics()

    def opening_chunks(self) -> list[Json]:
        """The chunks before the first delta."""
        return []

    def chunks(self, index: int, delta: Delta) -> Iterator[Json]:
        """The chunks for one delta of the index-th completion."""
        self._usage.add(index, delta)
        by_token = self._return_token_ids or self._return_logprobs or self._return_accepted or self._return_tree
        if delta.text or (delta.tokens and by_token):
            yield self._chunk(self._entry(index, self.delta(delta.text), delta))
        if delta.finish_reason is not None:
            yield from self._ending(index, delta)

    @abstractmethod
    def message(self, index: int, text: str) -> Json:
        """The text of a whole completion, under its field."""

    @abstractmethod
    def delta(self, text: str | None) -> Json:
        """Some text of a completion in a chunk, under its field; None: the chunk that ends the completion."""

    @abstractmethod
    def log_probs(self, delta: Delta) -> Json: ...

    def _entry(self, index: int, text: Json, delta: Delta) -> Json:
        entry = {"index": index, **text, "logprobs": None, "finish_reason": None}
        if self._return_logprobs:
            entry["logprobs"] = self.log_probs(delta)
        if self._return_token_ids:
            entry["token_ids"] = delta.tokens
        if self._return_accepted:
            entry["accepted"], entry["text_offset"] = delta.accepted, delta.offsets
        if self._return_tree:
            entry["trees"] = [self._tree(tree) for tree in delta.trees]
        return entry

    def _tree(self, tree: VerifiedTree) -> list[Json]:
        """The nodes that a step verified. `parent`: the number of a node in this list, from 1; 0 is the root."""
        nodes = zip(tree.parents, tree.tokens, tree.accepted, tree.methods, strict=True)
        return [
            {
                "parent": parent,
                "token_id": token,
                "token": spelled(token, self._tokenizer),
                "accepted": accepted,
                "method": method,
            }
            for parent, token, accepted, method in nodes
        ]

    def _ending(self, index: int, delta: Delta) -> Iterator[Json]:
        entry = {"index": index, **self.delta(None), "logprobs": None}
        last = self._chunk(entry | {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason})
        if self._usage.running:
            yield last
        elif self._options is None or not self._options.include_usage:
            yield last | self._statistics()
        else:
            yield last
            yield self._envelope | {"choices": [], "usage": self._usage.usage()} | self._statistics()

    def _chunk(self, entry: Json) -> Json:
        chunk = self._envelope | {"choices": [entry]}
        if self._options is not None and self._options.continuous_usage_stats:
            chunk["usage"] = self._usage.usage()
        elif self._options is not None and self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def _statistics(self) -> Json:
        if not self._reports:
            return {}
        return {"speculation": self._usage.speculation(), "timings": self._usage.timings()}


class CompletionResponse(OpenAIResponse):
    """`/v1/completions`. `echo` puts the prompt before the text."""

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, body: CompletionBody, requests: Sequence[GenerationRequest], model: ServedModel) -> None:
        super().__init__(body, requests, model)
        self._echoed = body.prompt if body.echo else []
        self._choices = body.choices

    def opening_chunks(self) -> list[Json]:
        if not self._echoed and not self._return_token_ids:
            return []
        return [
            self._chunk({**self.message(index, ""), "index": index, "logprobs": None, "finish_reason": None})
            for index in range(len(self._requests))
        ]

    def message(self, index: int, text: str) -> Json:
        message: Json = {"text": self._echoed_prompt(index) + text}
        if self._return_token_ids:
            message["prompt_token_ids"] = self._requests[index].prompt
        return message

    def delta(self, text: str | None) -> Json:
        return {"text": text or ""}

    def log_probs(self, delta: Delta) -> Json:
        return completion_log_probs(delta, self._tokenizer)

    def _echoed_prompt(self, index: int) -> str:
        if not self._echoed:
            return ""
        prompt = self._echoed[index // self._choices]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)


class ChatCompletionResponse(OpenAIResponse):
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def response(self, outputs: Sequence[Delta]) -> Json:
        return super().response(outputs) | self._prompt_ids()

    def opening_chunks(self) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None}) | self._prompt_ids()
            for index in range(len(self._requests))
        ]

    def message(self, index: int, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str | None) -> Json:
        return {"delta": {} if text is None else {"content": text}}

    def log_probs(self, delta: Delta) -> Json:
        return chat_log_probs(delta, self._tokenizer)

    def _prompt_ids(self) -> Json:
        return {"prompt_token_ids": self._requests[0].prompt} if self._return_token_ids else {}
