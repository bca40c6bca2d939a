"""Pieces of choices as OpenAI's response objects: whole, or as the chunks of a stream.

A stream has, for chat, a first chunk with the role; a chunk for each piece that shows something; a chunk with
the finish reason for each choice; and if asked for, one with the usage. Statistics ride on the very last one.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.core.messages import FinishReason
from paceline_services.gateway.generation import GenerationRequest, OutputChunk, concatenate_chunks
from paceline_services.gateway.openai.bodies import CompletionBody, GenerationBody
from paceline_services.gateway.openai.logprobs import chat_log_probs, completion_log_probs
from paceline_services.gateway.openai.usage import RequestUsage
from paceline_services.gateway.served_model import ServedModel

Json = dict[str, Any]


class OpenAIResponse(ABC):
    """The answer to one request, built from the pieces of its choices. Good for once, whole or streamed."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, body: GenerationBody, choices: Sequence[GenerationRequest], gateway: ServedModel) -> None:
        self._choices = choices
        self._tokenizer = gateway.tokenizer
        self._usage = RequestUsage(choices, body.n or 1)
        self._options = body.stream_options
        self._streams = bool(body.stream)
        self._reports = body.speculation_stats
        self._return_token_ids = body.return_token_ids
        self._return_accepted = body.return_accepted
        self._return_logprobs = body.top_log_probs is not None
        self._envelope: Json = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "object": self.chunk_object,
            "created": int(time.time()),
            "model": gateway.model,
            "system_fingerprint": f"fp_{gateway.tokenizer.fingerprint[:12]}",
        }

    @property
    def is_stream(self) -> bool:
        return self._streams

    def response(self, pieces: Sequence[Sequence[OutputChunk]]) -> Json:
        """The response object, from all pieces of each choice."""
        entries = []
        for index, parts in enumerate(pieces):
            piece = concatenate_chunks(parts)
            self._usage.add(index, piece)
            end = {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
            entries.append(self._entry(index, self.message(index, piece.text), piece) | end)
        answer = {"object": self.whole_object, "choices": entries, "usage": self._usage.usage()}
        return self._envelope | answer | self._statistics()

    def opening_chunks(self) -> list[Json]:
        """The chunks that come before any piece."""
        return []

    def chunks(self, index: int, piece: OutputChunk) -> Iterator[Json]:
        """The chunks for one piece of a choice."""
        self._usage.add(index, piece)
        by_token = self._return_token_ids or self._return_logprobs or self._return_accepted
        if piece.text or (piece.tokens and by_token):
            yield self._chunk(self._entry(index, self.delta(piece.text), piece))
        if piece.finish_reason is not None:
            yield from self._ending(index, piece.finish_reason, piece.stop_reason)

    @abstractmethod
    def message(self, index: int, text: str) -> Json:
        """The text of a whole choice, under its field."""

    @abstractmethod
    def delta(self, text: str | None) -> Json:
        """Some text of a choice in a chunk, under its field; None: the chunk that ends the choice."""

    @abstractmethod
    def log_probs(self, index: int, piece: OutputChunk) -> Json: ...

    def _entry(self, index: int, shown: Json, piece: OutputChunk) -> Json:
        entry = {"index": index, **shown, "logprobs": None, "finish_reason": None}
        if self._return_logprobs:
            entry["logprobs"] = self.log_probs(index, piece)
        if self._return_token_ids:
            entry["token_ids"] = piece.tokens
        if self._return_accepted:
            entry["accepted"], entry["text_offset"] = piece.accepted, piece.offsets
        return entry

    def _ending(self, index: int, reason: FinishReason, stop_reason: int | str | None) -> Iterator[Json]:
        usage_last = self._options is not None and self._options.include_usage
        entry = {"index": index, **self.delta(None), "logprobs": None}
        last = self._chunk(entry | {"finish_reason": reason, "stop_reason": stop_reason})
        if self._usage.open_choices:
            yield last
        elif not usage_last:
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

    def __init__(self, body: CompletionBody, choices: Sequence[GenerationRequest], gateway: ServedModel) -> None:
        super().__init__(body, choices, gateway)
        self._prompts = body.prompt if body.echo else []
        self._per_prompt = body.n or 1

    def opening_chunks(self) -> list[Json]:
        if not self._prompts and not self._return_token_ids:
            return []
        entries = [
            {**self.message(index, ""), "index": index, "logprobs": None, "finish_reason": None}
            for index in range(len(self._choices))
        ]
        return [self._chunk(entry) for entry in entries]

    def message(self, index: int, text: str) -> Json:
        shown: Json = {"text": self._echoed_prompt(index) + text}
        if self._return_token_ids:
            shown["prompt_token_ids"] = self._choices[index].prompt
        return shown

    def delta(self, text: str | None) -> Json:
        return {"text": text or ""}

    def log_probs(self, index: int, piece: OutputChunk) -> Json:
        return completion_log_probs(piece, self._tokenizer)

    def _echoed_prompt(self, index: int) -> str:
        if not self._prompts:
            return ""
        prompt = self._prompts[index // self._per_prompt]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)


class ChatCompletionResponse(OpenAIResponse):
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def response(self, pieces: Sequence[Sequence[OutputChunk]]) -> Json:
        return super().response(pieces) | self._prompt_ids()

    def opening_chunks(self) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        entries = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for index in range(len(self._choices))
        ]
        return [self._chunk(entry) | self._prompt_ids() for entry in entries]

    def message(self, index: int, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str | None) -> Json:
        return {"delta": {} if text is None else {"content": text}}

    def log_probs(self, index: int, piece: OutputChunk) -> Json:
        return chat_log_probs(piece, self._tokenizer)

    def _prompt_ids(self) -> Json:
        return {"prompt_token_ids": self._choices[0].prompt} if self._return_token_ids else {}
