"""Deltas as the responses to one call of `Generate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.messages import LogProbs
from paceline.output_processor import TextDelta
from paceline.parsing import Content, Reasoning, ToolArguments, ToolCall
from paceline.v1 import inference_pb2 as pb
from paceline.wire.common_codec import FINISH_REASONS, encode_stats, encode_timings
from paceline.wire.target_codec import encode_tree
from paceline_services.gateway.generation.bodies import ChatBody, CompletionBody, GenerationBody
from paceline_services.gateway.generation.chat_output import ChatOutput
from paceline_services.gateway.generation.completion_request import CompletionRequest
from paceline_services.gateway.generation.deltas import DeltaBuffer
from paceline_services.gateway.generation.echoed_prompt import EchoedPrompt
from paceline_services.gateway.generation.served_model import ServedModel


class GenerateResponses:
    """The responses to one call, from the deltas of its choices."""

    def __init__(self, body: GenerationBody, requests: Sequence[CompletionRequest], model: ServedModel) -> None:
        self._buffer = DeltaBuffer(body.stream_interval or 1)
        self._echoed: EchoedPrompt | None = None
        if isinstance(body, CompletionBody) and body.echo:
            self._echoed = EchoedPrompt.of(body, 0, requests[0].prompt, model.tokenizer)
        self._begun: set[int] = set()
        self._chats = [ChatOutput(body, each, model) for each in requests] if isinstance(body, ChatBody) else []

    def of(self, index: int, delta: TextDelta) -> Iterator[pb.GenerateResponse]:
        """The responses for one delta of a choice. What is known of the prompt does not wait for tokens."""
        if self._echoed is not None and index not in self._begun:
            self._begun.add(index)
            yield pb.GenerateResponse(index=index, text=self._echoed.text, prompt_token_ids=self._echoed.tokens)
        for part in delta.prompt_log_probs:
            entries = [_encode_log_probs(each) for each in part.entries]
            scores = pb.GenerateResponse.PromptLogProbs(start=part.start, entries=entries)
            yield pb.GenerateResponse(index=index, prompt_log_probs=[scores])
        delta.prompt_log_probs = []
        if (due := self._buffer.add(index, delta)) is not None:
            yield _encode_delta(index, due, self._chats[index] if self._chats else None)


def _encode_delta(index: int, delta: TextDelta, chat: ChatOutput | None) -> pb.GenerateResponse:
    """`chat` None: the text is no chat's."""
    log_probs = [_encode_log_probs(each) for each in delta.log_probs]
    response = pb.GenerateResponse(
        index=index,
        token_ids=delta.tokens,
        log_probs=log_probs,
        accepted=delta.accepted,
        trees=map(encode_tree, delta.trees),
        reasoning_tokens=delta.reasoning_tokens,
    )
    if chat is None:
        response.text = delta.text
    else:
        _add_parts(response, delta, chat)
    if delta.finish_reason is not None and delta.usage is not None:
        response.finish_reason = FINISH_REASONS[delta.finish_reason]
        response.prompt_tokens = delta.usage.prompt_tokens
        response.completion_tokens = delta.usage.completion_tokens
        match delta.stop_reason:
            case str():
                response.stop_string = delta.stop_reason
            case int():
                response.stop_token_id = delta.stop_reason
        response.timings.CopyFrom(encode_timings(delta.timings))
        if delta.speculation is not None:
            response.speculation.CopyFrom(encode_stats(replace(delta.speculation, accepted_average=None)))
    return response


def _add_parts(response: pb.GenerateResponse, delta: TextDelta, output: ChatOutput) -> None:
    """Add a chat's delta to a response: text, reasoning and calls."""
    for event in output.events(delta):
        match event:
            case Content(text):
                response.text += text
            case Reasoning(text):
                response.reasoning += text
            case ToolCall(index, name):
                response.tool_calls.add(index=index, id=output.call_id(index), name=name)
            case ToolArguments(index, text):
                response.tool_calls.add(index=index, arguments=text)


def _encode_log_probs(log_probs: LogProbs) -> pb.GenerateResponse.LogProbs:
    top = [pb.GenerateResponse.TokenLogProb(token_id=token, log_prob=value) for token, value in log_probs.top]
    return pb.GenerateResponse.LogProbs(log_prob=log_probs.log_prob, top=top, rank=log_probs.rank)
