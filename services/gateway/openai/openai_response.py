"""Deltas as OpenAI's response objects: whole, or as the chunks of a stream.

A stream has, for chat, a first chunk with the role; a chunk for each delta with text, or several if it has reasoning,
content and calls; a chunk with the finish reason for each completion; and if asked for, a chunk with the usage. What
belongs to tokens is in a delta's first chunk. Statistics are in the very last chunk.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from paceline.core.messages import Delta, GenerationRequest
from paceline_services.gateway.openai.bodies import ChatBody, CompletionBody, GenerationBody
from paceline_services.gateway.openai.chat_output import ChatOutput
from paceline_services.gateway.openai.logprobs import chat_log_probs, completion_log_probs
from paceline_services.gateway.openai.usage import RequestUsage
from paceline_services.gateway.served_model import ServedModel

Json = dict[str, Any]


class OpenAIResponse(ABC):
    """The response to one HTTP request, built once from the deltas of its completions: whole or streamed."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    empty: ClassVar[Json]
    """What a chunk without text has in the text's field."""
    ending: ClassVar[Json]
    """The same for the chunk that ends a completion."""

    def __init__(self, body: GenerationBody, requests: Sequence[GenerationRequest], model: ServedModel) -> None:
        self.streamed = bool(body.stream)
        self._requests = requests
        self._tokenizer = model.tokenizer
        self._usage = RequestUsage(requests, body.choices)
        self._options = body.stream_options
        self._reports = body.speculation_stats
        self._return_token_ids = body.return_token_ids
        self._return_accepted = body.return_accepted
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
            message = self.message(index, output)
            end = {"finish_reason": self.finish_reason(index, output), "stop_reason": output.stop_reason}
            entries.append(self._entry(index, message, output) | end)
        response = {"object": self.whole_object, "choices": entries, "usage": self._usage.usage()}
        return self._envelope | response | self._statistics()

    def opening_chunks(self) -> list[Json]:
        """The chunks before the first delta."""
        return []

    def chunks(self, index: int, delta: Delta) -> Iterator[Json]:
        """The chunks for one delta of the index-th completion."""
        self._usage.add(index, delta)
        by_token = self._return_token_ids or self._return_logprobs or self._return_accepted
        parts = self.parts(index, delta) or ([self.empty] if delta.tokens and by_token else [])
        for number, part in enumerate(parts):
            yield self._chunk(self._entry(index, part, None if number else delta))
        if delta.finish_reason is not None:
            yield from self._ending(index, delta)

    def finish_reason(self, index: int, delta: Delta) -> str | None:
        """Of the index-th completion. `delta`: its last one, or the whole output."""
        return delta.finish_reason

    @abstractmethod
    def message(self, index: int, output: Delta) -> Json:
        """The text of a whole completion, under its field."""

    @abstractmethod
    def parts(self, index: int, delta: Delta) -> list[Json]:
        """The texts of a delta, one per chunk, under their fields."""

    @abstractmethod
    def log_probs(self, delta: Delta) -> Json: ...

    def _entry(self, index: int, text: Json, delta: Delta | None) -> Json:
        """`delta` None: what belongs to its tokens is in another chunk."""
        entry = {"index": index, **text, "logprobs": None, "finish_reason": None}
        if delta is None:
            return entry
        if self._return_logprobs:
            entry["logprobs"] = self.log_probs(delta)
        if self._return_token_ids:
            entry["token_ids"] = delta.tokens
        if self._return_accepted:
            entry["accepted"], entry["text_offset"] = delta.accepted, delta.offsets
        return entry

    def _ending(self, index: int, delta: Delta) -> Iterator[Json]:
        entry = {"index": index, **self.ending, "logprobs": None}
        end = {"finish_reason": self.finish_reason(index, delta), "stop_reason": delta.stop_reason}
        last = self._chunk(entry | end)
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
    empty: ClassVar[Json] = {"text": ""}
    ending: ClassVar[Json] = {"text": ""}

    def __init__(self, body: CompletionBody, requests: Sequence[GenerationRequest], model: ServedModel) -> None:
        super().__init__(body, requests, model)
        self._echoed = body.prompt if body.echo else []
        self._choices = body.choices

    def opening_chunks(self) -> list[Json]:
        if not self._echoed and not self._return_token_ids:
            return []
        return [
            self._chunk({**self._text(index, ""), "index": index, "logprobs": None, "finish_reason": None})
            for index in range(len(self._requests))
        ]

    def message(self, index: int, output: Delta) -> Json:
        return self._text(index, output.text)

    def parts(self, index: int, delta: Delta) -> list[Json]:
        return [{"text": delta.text}] if delta.text else []

    def log_probs(self, delta: Delta) -> Json:
        return completion_log_probs(delta, self._tokenizer)

    def _text(self, index: int, text: str) -> Json:
        message: Json = {"text": self._echoed_prompt(index) + text}
        if self._return_token_ids:
            message["prompt_token_ids"] = self._requests[index].prompt
        return message

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
    empty: ClassVar[Json] = {"delta": {"content": ""}}
    ending: ClassVar[Json] = {"delta": {}}

    def __init__(self, body: ChatBody, requests: Sequence[GenerationRequest], model: ServedModel) -> None:
        super().__init__(body, requests, model)
        self._first_content = None if body.offered_tools else ""
        self._outputs = [ChatOutput(body, request, model) for request in requests]

    def response(self, outputs: Sequence[Delta]) -> Json:
        return super().response(outputs) | self._prompt_ids()

    def opening_chunks(self) -> list[Json]:
        delta = {"role": "assistant", "content": self._first_content}
        return [
            self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None}) | self._prompt_ids()
            for index in range(len(self._requests))
        ]

    def message(self, index: int, output: Delta) -> Json:
        return {"message": self._outputs[index].message(output)}

    def parts(self, index: int, delta: Delta) -> list[Json]:
        return [{"delta": part} for part in self._outputs[index].deltas(delta)]

    def finish_reason(self, index: int, delta: Delta) -> str | None:
        return self._outputs[index].finish_reason(delta)

    def log_probs(self, delta: Delta) -> Json:
        return chat_log_probs(delta, self._tokenizer)

    def _prompt_ids(self) -> Json:
        return {"prompt_token_ids": self._requests[0].prompt} if self._return_token_ids else {}
