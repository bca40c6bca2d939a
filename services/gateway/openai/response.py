"""Deltas as OpenAI's response objects: whole, or as the chunks of a stream.

A stream has, for chat, a first chunk with the role; a chunk for each delta with text, or several if it has reasoning,
content and calls; a chunk with the finish reason for each completion; and if asked for, a chunk with the usage. What
belongs to tokens is in a delta's first chunk. Statistics are in the very last chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import ClassVar

from paceline.messages import VerifiedTree
from paceline.output_processor import TextDelta
from paceline_services.gateway.generation.bodies import ChatBody, CompletionBody, GenerationBody
from paceline_services.gateway.generation.chat_output import ChatOutput
from paceline_services.gateway.generation.completion_request import CompletionRequest
from paceline_services.gateway.generation.deltas import DeltaBuffer
from paceline_services.gateway.generation.echoed_prompt import EchoedPrompt
from paceline_services.gateway.generation.logprobs import (
    TokenSpelling,
    chat_log_probs,
    completion_log_probs,
    prompt_log_probs,
    spelled,
)
from paceline_services.gateway.generation.served_model import ServedModel
from paceline_services.gateway.generation.usage import RequestUsage
from paceline_services.gateway.http.json_body import Json


class OpenAIResponse(ABC):
    """The response to one HTTP request, built once from the deltas of its completions: whole or streamed."""

    id_prefix: str
    whole_object: str
    chunk_object: str
    empty: ClassVar[Json]
    """What a chunk without text has in the text's field."""
    ending: ClassVar[Json]
    """The same for the chunk that ends a completion."""

    def __init__(
        self, body: GenerationBody, requests: Sequence[CompletionRequest], model: ServedModel, created: int
    ) -> None:
        """`created`: when the API request came; whole seconds since 1970."""
        self.streamed = bool(body.stream)
        self._requests = requests
        self._tokenizer = model.tokenizer
        self._usage = RequestUsage(requests, body.choice_count)
        self._options = body.stream_options
        self._reports = body.speculation_stats
        self._return_token_ids = body.return_token_ids
        self._return_accepted = body.return_accepted
        self._return_tree = body.return_tree
        self._return_logprobs = body.top_log_probs is not None
        self._prompt_logprobs = body.prompt_logprobs
        self._spelling = TokenSpelling(model.tokenizer, by_id=bool(body.return_tokens_as_token_ids))
        self._choice_count, self._kept_count = body.choice_count, body.kept_count
        self._buffer = DeltaBuffer(body.stream_interval or 1)
        self._envelope: Json = {
            "id": f"{self.id_prefix}-{body.request_id or requests[0].group}",
            "object": self.chunk_object,
            "created": created,
            "model": model.model,
            "system_fingerprint": f"fp_{model.tokenizer.fingerprint[:12]}",
            **requests[0].left_out_json,
        }

    def response(self, outputs: Sequence[TextDelta]) -> Json:
        """The response object, from the whole output of each completion."""
        for index, output in enumerate(outputs):
            self._usage.add(index, output)
        kept = self._kept(outputs)
        entries = [self.whole_entry(index, outputs) | {"index": number} for number, index in enumerate(kept)]
        response = {"object": self.whole_object, "choices": entries, "usage": self._usage.usage()}
        return self._envelope | response | self._statistics()

    def opening_chunks(self) -> list[Json]:
        """The chunks before the first delta."""
        return []

    def chunks(self, index: int, delta: TextDelta) -> Iterator[Json]:
        """The chunks for one delta of the index-th completion, and those before it that waited for it."""
        due = self._buffer.add(index, delta)
        return iter(()) if due is None else self._chunks_of(index, due)

    def _chunks_of(self, index: int, delta: TextDelta) -> Iterator[Json]:
        self._usage.add(index, delta)
        by_token = self._return_token_ids or self._return_logprobs or self._return_accepted or self._return_tree
        only = delta.finish_reason is not None and not self._requests[index].sampling.max_tokens
        parts = self.parts(index, delta) or ([self.empty] if by_token and (delta.tokens or only) else [])
        for number, part in enumerate(parts):
            yield self._chunk(self._entry(index, part, None if number else delta))
        if delta.finish_reason is not None:
            yield from self._ending(index, delta)

    def finish_reason(self, index: int, delta: TextDelta) -> str | None:
        """Of the index-th completion. `delta`: its last one, or the whole output."""
        return delta.finish_reason

    def whole_entry(self, index: int, outputs: Sequence[TextDelta]) -> Json:
        """The entry of a whole completion."""
        output = outputs[index]
        message = self.message(index, output)
        end = {"finish_reason": self.finish_reason(index, output), "stop_reason": output.stop_reason}
        return self._entry(index, message, output) | end

    @abstractmethod
    def message(self, index: int, output: TextDelta) -> Json:
        """The text of a whole completion, under its field."""

    @abstractmethod
    def parts(self, index: int, delta: TextDelta) -> list[Json]:
        """The texts of a delta, one per chunk, under their fields."""

    @abstractmethod
    def log_probs(self, index: int, delta: TextDelta) -> Json: ...

    def offsets(self, index: int, delta: TextDelta) -> list[int]:
        """By token, the characters of the choice's text before it."""
        return delta.offsets

    def _entry(self, index: int, text: Json, delta: TextDelta | None) -> Json:
        """`delta` None: what belongs to its tokens is in another chunk."""
        entry = {"index": index, **text, "logprobs": None, "finish_reason": None}
        if delta is None:
            return entry
        if self._return_logprobs:
            entry["logprobs"] = self.log_probs(index, delta)
        if self._return_token_ids:
            entry["token_ids"] = delta.tokens
        if self._return_accepted:
            entry["accepted"], entry["text_offset"] = delta.accepted, self.offsets(index, delta)
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

    def _kept(self, outputs: Sequence[TextDelta]) -> Sequence[int]:
        """The completions to return: of each prompt's, those with the highest mean log-probability, best first."""
        indices = range(len(outputs))
        if self._kept_count == self._choice_count:
            return indices
        kept: list[int] = []
        for first in indices[:: self._choice_count]:
            of_prompt = indices[first : first + self._choice_count]
            kept += sorted(of_prompt, key=lambda index: -_mean_log_prob(outputs[index]))[: self._kept_count]
        return kept

    def _prompt_log_probs(self, index: int, outputs: Sequence[TextDelta]) -> Json:
        """The log-probabilities of the index-th completion's prompt, if asked for: its first completion has them."""
        if self._prompt_logprobs is None:
            return {}
        first = index - index % self._choice_count
        entries = [each for part in outputs[first].prompt_log_probs for each in part.entries]
        prompt = self._requests[first].prompt
        return {"prompt_logprobs": prompt_log_probs(prompt, entries, self._prompt_logprobs, self._tokenizer)}

    def _ending(self, index: int, delta: TextDelta) -> Iterator[Json]:
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
    """`/v1/completions`. `echo` puts the prompt before the text, with `logprobs` also before their lists."""

    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"
    empty: ClassVar[Json] = {"text": ""}
    ending: ClassVar[Json] = {"text": ""}

    def __init__(
        self, body: CompletionBody, requests: Sequence[CompletionRequest], model: ServedModel, created: int
    ) -> None:
        super().__init__(body, requests, model, created)
        self._top_log_probs = body.top_log_probs or 0
        self._scores_echo = body.scores_echo
        prompts = [request.prompt for request in requests[:: self._choice_count]] if body.echo else []
        self._echoed = [EchoedPrompt.of(body, index, each, self._tokenizer) for index, each in enumerate(prompts)]
        self._waiting: list[list[tuple[int, TextDelta]]] = [[] for _ in range(body.prompts)]
        """By prompt, deltas of its completions that came before the prompt's log-probabilities."""
        self._opened: set[int] = set()

    def response(self, outputs: Sequence[TextDelta]) -> Json:
        for prompt, first in zip(self._echoed, outputs[:: self._choice_count], strict=False):
            prompt.add(first)
        return super().response(outputs)

    def whole_entry(self, index: int, outputs: Sequence[TextDelta]) -> Json:
        entry = super().whole_entry(index, outputs) | self._prompt_log_probs(index, outputs)
        if self._scores_echo:
            lists = entry["logprobs"]
            entry["logprobs"] = {name: [*first, *lists[name]] for name, first in self._prompt_lists(index).items()}
        return entry

    def opening_chunks(self) -> list[Json]:
        if self._scores_echo or not (self._echoed or self._return_token_ids):
            return []
        return [self._opening(index) for index in range(len(self._requests))]

    def chunks(self, index: int, delta: TextDelta) -> Iterator[Json]:
        if not self._scores_echo:
            yield from super().chunks(index, delta)
            return
        prompt, choice = divmod(index, self._choice_count)
        if choice == 0:
            self._echoed[prompt].add(delta)
        self._waiting[prompt].append((index, delta))
        if not self._echoed[prompt].scored:
            return
        waiting, self._waiting[prompt] = self._waiting[prompt], []
        for each, held in waiting:
            if each not in self._opened:
                self._opened.add(each)
                yield self._opening(each)
            yield from super().chunks(each, held)

    def message(self, index: int, output: TextDelta) -> Json:
        return self._text(index, output.text)

    def parts(self, index: int, delta: TextDelta) -> list[Json]:
        return [{"text": delta.text}] if delta.text else []

    def _text(self, index: int, text: str) -> Json:
        echoed = self._echoed_prompt(index)
        message: Json = {"text": text if echoed is None else echoed.text + text}
        if self._return_token_ids:
            message["prompt_token_ids"] = self._requests[index].prompt
        return message

    def log_probs(self, index: int, delta: TextDelta) -> Json:
        return completion_log_probs(delta.tokens, delta.log_probs, self.offsets(index, delta), self._spelling)

    def offsets(self, index: int, delta: TextDelta) -> list[int]:
        echoed = self._echoed_prompt(index)
        return delta.offsets if echoed is None else [len(echoed.text) + offset for offset in delta.offsets]

    def _opening(self, index: int) -> Json:
        """The first chunk of a completion whose text begins with its prompt."""
        log_probs = self._prompt_lists(index) if self._scores_echo else None
        entry = {"index": index, **self._text(index, ""), "logprobs": log_probs, "finish_reason": None}
        return self._chunk(entry)

    def _prompt_lists(self, index: int) -> Json:
        """The log-probabilities of a completion's echoed prompt."""
        echoed = self._echoed[index // self._choice_count]
        log_probs = echoed.entries(self._top_log_probs)
        return completion_log_probs(echoed.tokens, log_probs, echoed.offsets, self._spelling)

    def _echoed_prompt(self, index: int) -> EchoedPrompt | None:
        return self._echoed[index // self._choice_count] if self._echoed else None


class ChatCompletionResponse(OpenAIResponse):
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    empty: ClassVar[Json] = {"delta": {"content": ""}}
    ending: ClassVar[Json] = {"delta": {}}

    def __init__(self, body: ChatBody, requests: Sequence[CompletionRequest], model: ServedModel, created: int) -> None:
        super().__init__(body, requests, model, created)
        self._first_content = None if body.offered_tools else ""
        self._outputs = [ChatOutput(body, request, model) for request in requests]

    def response(self, outputs: Sequence[TextDelta]) -> Json:
        return super().response(outputs) | self._prompt_ids() | self._prompt_log_probs(0, outputs)

    def opening_chunks(self) -> list[Json]:
        delta = {"role": "assistant", "content": self._first_content}
        return [
            self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None}) | self._prompt_ids()
            for index in range(len(self._requests))
        ]

    def message(self, index: int, output: TextDelta) -> Json:
        return {"message": self._outputs[index].message(output)}

    def parts(self, index: int, delta: TextDelta) -> list[Json]:
        return [{"delta": part} for part in self._outputs[index].deltas(delta)]

    def finish_reason(self, index: int, delta: TextDelta) -> str | None:
        return self._outputs[index].finish_reason(delta)

    def log_probs(self, index: int, delta: TextDelta) -> Json:
        return chat_log_probs(delta, self._spelling)

    def _prompt_ids(self) -> Json:
        return {"prompt_token_ids": self._requests[0].prompt} if self._return_token_ids else {}


def _mean_log_prob(output: TextDelta) -> float:
    return fmean(each.log_prob for each in output.log_probs) if output.log_probs else 0.0
