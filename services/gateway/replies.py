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

from paceline.messages import FinishReason
from services.gateway.bodies import CompletionBody, GenerationBody
from services.gateway.choice import Choice, Piece, joined
from services.gateway.gateway import Gateway
from services.gateway.log_probs import chat_log_probs, completion_log_probs
from services.gateway.tally import Tally

Json = dict[str, Any]


class Reply(ABC):
    """The answer to one request, built from the pieces of its choices. Good for once, whole or streamed."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, body: GenerationBody, choices: Sequence[Choice], gateway: Gateway) -> None:
        self._choices = choices
        self._tokenizer = gateway.tokenizer
        self._tally = Tally(choices, body.n or 1)
        self._options = body.stream_options
        self._streams = bool(body.stream)
        self._reports = body.speculation_stats
        self._shows_tokens = body.return_token_ids
        self._shows_accepted = body.return_accepted
        self._shows_log_probs = body.top_log_probs is not None
        self._head: Json = {
            "id": f"{self.id_prefix}-{uuid.uuid4().hex}",
            "object": self.chunk_object,
            "created": int(time.time()),
            "model": gateway.model,
            "system_fingerprint": f"fp_{gateway.tokenizer.fingerprint[:12]}",
        }

    @property
    def streams(self) -> bool:
        return self._streams

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Json:
        """The response object, from all pieces of each choice."""
        entries = []
        for index, parts in enumerate(pieces):
            piece = joined(parts)
            self._tally.add(index, piece)
            end = {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
            entries.append(self._entry(index, self.message(index, piece.text), piece) | end)
        answer = {"object": self.whole_object, "choices": entries, "usage": self._tally.usage()}
        return self._head | answer | self._report()

    def opening(self) -> list[Json]:
        """The chunks that come before any piece."""
        return []

    def chunks(self, index: int, piece: Piece) -> Iterator[Json]:
        """The chunks for one piece of a choice."""
        self._tally.add(index, piece)
        by_token = self._shows_tokens or self._shows_log_probs or self._shows_accepted
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
    def log_probs(self, index: int, piece: Piece) -> Json: ...

    def _entry(self, index: int, shown: Json, piece: Piece) -> Json:
        entry = {"index": index, **shown, "logprobs": None, "finish_reason": None}
        if self._shows_log_probs:
            entry["logprobs"] = self.log_probs(index, piece)
        if self._shows_tokens:
            entry["token_ids"] = piece.tokens
        if self._shows_accepted:
            entry["accepted"], entry["text_offset"] = piece.accepted, piece.offsets
        return entry

    def _ending(self, index: int, reason: FinishReason, stop_reason: int | str | None) -> Iterator[Json]:
        usage_last = self._options is not None and self._options.include_usage
        entry = {"index": index, **self.delta(None), "logprobs": None}
        last = self._chunk(entry | {"finish_reason": reason, "stop_reason": stop_reason})
        if self._tally.unfinished:
            yield last
        elif not usage_last:
            yield last | self._report()
        else:
            yield last
            yield self._head | {"choices": [], "usage": self._tally.usage()} | self._report()

    def _chunk(self, entry: Json) -> Json:
        chunk = self._head | {"choices": [entry]}
        if self._options is not None and self._options.continuous_usage_stats:
            chunk["usage"] = self._tally.usage()
        elif self._options is not None and self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def _report(self) -> Json:
        if not self._reports:
            return {}
        return {"speculation": self._tally.speculation(), "timings": self._tally.timings()}


class CompletionReply(Reply):
    """`/v1/completions`. `echo` puts the prompt before the text."""

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(self, body: CompletionBody, choices: Sequence[Choice], gateway: Gateway) -> None:
        super().__init__(body, choices, gateway)
        self._prompts = body.prompt if body.echo else []
        self._per_prompt = body.n or 1

    def opening(self) -> list[Json]:
        if not self._prompts and not self._shows_tokens:
            return []
        entries = [
            {**self.message(index, ""), "index": index, "logprobs": None, "finish_reason": None}
            for index in range(len(self._choices))
        ]
        return [self._chunk(entry) for entry in entries]

    def message(self, index: int, text: str) -> Json:
        shown: Json = {"text": self._echo(index) + text}
        if self._shows_tokens:
            shown["prompt_token_ids"] = self._choices[index].prompt
        return shown

    def delta(self, text: str | None) -> Json:
        return {"text": text or ""}

    def log_probs(self, index: int, piece: Piece) -> Json:
        return completion_log_probs(piece, self._tokenizer)

    def _echo(self, index: int) -> str:
        if not self._prompts:
            return ""
        prompt = self._prompts[index // self._per_prompt]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)


class ChatReply(Reply):
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> Json:
        return super().whole(pieces) | self._prompt_ids()

    def opening(self) -> list[Json]:
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

    def log_probs(self, index: int, piece: Piece) -> Json:
        return chat_log_probs(piece, self._tokenizer)

    def _prompt_ids(self) -> Json:
        return {"prompt_token_ids": self._choices[0].prompt} if self._shows_tokens else {}
