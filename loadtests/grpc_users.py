"""Who asks over gRPC: `InferenceService` on the gateway.

gRPC's C core does not see gevent's sockets; it has to be told to drive gevent's loop, after Locust has patched Python
and before the first channel. A channel keeps a native thread of gevent's pool, so all users of a process share one.
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
from loadtests.stream_check import ReceivedStream, check_stream, check_unfinished
from paceline.v1 import common_pb2, inference_pb2_grpc
from paceline.v1 import inference_pb2 as pb

grpc_gevent.init_gevent()

LONGEST_S = 600.0
"""No answer takes longer, however slow the machine."""


class GrpcUser(RecordingUser):
    """`stub` is set before the first one is made."""

    kind = "grpc"
    weight = 10
    stub: ClassVar[Any]

    @classmethod
    def connect(cls, address: str) -> None:
        cls.stub = inference_pb2_grpc.InferenceServiceStub(grpc.insecure_channel(address))

    @task
    def generate(self) -> None:
        question = self.questions.short(chat=False)
        began, heard, left = time.time(), ReceivedStream(), False
        call = self.stub.Generate(encoded(question, speculative=self.speculative), timeout=LONGEST_S)
        try:
            for response in call:
                add_response(heard, time.time(), response)
            heard.complete = True
        except grpc.RpcError as error:
            heard.error = repr(error)
        except GreenletExit:  # the run is over
            heard, left = check_unfinished(began, heard, self.stalled_s), True
            raise
        finally:
            call.cancel()
            self.report(check_stream(self.kind, began, question, heard, left=left))


def encoded(question: Question, *, speculative: bool) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text=question.text,
        sampling=pb.GenerateRequest.Sampling(**question.sampling),
        speculative=common_pb2.SpeculativeOptions(enabled=speculative, report=True),
    )


def add_response(heard: ReceivedStream, when: float, response: pb.GenerateResponse) -> None:
    heard.add_tokens(when, list(response.token_ids))
    if response.finish_reason:
        heard.finish_reason = common_pb2.FinishReason.Name(response.finish_reason)
        heard.counted, heard.prompt_tokens = response.completion_tokens, response.prompt_tokens
        stats = response.speculation
        heard.verifications, heard.drafted = stats.verifications, stats.drafted_tokens
        heard.accepted = sum(stats.accepted_by_depth)
