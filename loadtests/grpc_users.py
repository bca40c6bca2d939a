"""The gRPC user: a client of the gateway's `InferenceService`.

gRPC's C core does not use gevent's sockets; `init_gevent` makes it drive gevent's loop, and must run after Locust has
patched Python and before the first channel. A channel occupies a native thread of gevent's pool, so all users of a
process share one.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

import grpc
from gevent import GreenletExit
from grpc.experimental import gevent as grpc_gevent
from locust import task

from loadtests.http_users import RecordingUser
from loadtests.load_requests import Question
from loadtests.received_stream import ReceivedStream
from loadtests.stream_check import check_stream, check_unfinished
from paceline.v1 import common_pb2, inference_pb2_grpc
from paceline.v1 import inference_pb2 as pb

grpc_gevent.init_gevent()

LONGEST_S = 600.0
"""Timeout of a call, for the slowest machine."""


class GrpcUser(RecordingUser):
    """`connect` sets `stub` before the first user starts."""

    kind = "grpc"
    weight = 10
    stub: ClassVar[Any]

    @classmethod
    def connect(cls, address: str) -> None:
        cls.stub = inference_pb2_grpc.InferenceServiceStub(grpc.insecure_channel(address))

    @task
    def generate(self) -> None:
        question = self.load_run.questions.short(chat=False)
        began, stream, left = time.time(), ReceivedStream(), False
        call = self.stub.Generate(encoded(question, speculative=self.load_run.speculative), timeout=LONGEST_S)
        try:
            for response in call:
                stream.add_chunk(as_chunk(response), time.time())
            stream.complete = True
        except grpc.RpcError as error:
            stream.error = repr(error)
        except GreenletExit:  # the run is over
            stream, left = check_unfinished(began, stream, self.load_run.profile.stalled_s), True
            raise
        finally:
            call.cancel()
            self.report(check_stream(self.kind, began, question, stream, left=left))


def encoded(question: Question, *, speculative: bool) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text=question.text,
        sampling=pb.GenerateRequest.Sampling(**question.sampling),
        speculative=common_pb2.SpeculativeOptions(enabled=speculative, report=True),
    )


def as_chunk(response: pb.GenerateResponse) -> dict[str, Any]:
    """The response as a chunk of the HTTP API."""
    choice: dict[str, Any] = {"token_ids": list(response.token_ids), "finish_reason": None}
    if not response.finish_reason:
        return {"choices": [choice]}
    choice["finish_reason"] = common_pb2.FinishReason.Name(response.finish_reason)
    stats = response.speculation
    return {
        "choices": [choice],
        "usage": {"completion_tokens": response.completion_tokens, "prompt_tokens": response.prompt_tokens},
        "speculation": {
            "verifications": stats.verifications,
            "drafted_tokens": stats.drafted_tokens,
            "accepted_by_depth": list(stats.accepted_by_depth),
        },
    }
