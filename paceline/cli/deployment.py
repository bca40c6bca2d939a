"""What runs on this machine: which services, with which arguments, and whether that can work at all."""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypeVar

from paceline import family
from paceline.cli import cpu_affinity
from paceline.cli.supervised_process import Program, StartError
from paceline.config import MAPPING_HINT, METHODS_READ_FROM_CHECKPOINT, POOL, EngineConfig, SpeculativeConfig
from paceline.model_names import ModelNotFoundError, is_fake_model, resolve_model, served_name

LOOPBACK = "127.0.0.1"
DRAIN_S = 30.0
"""How long requests that run may go on once the gateway or a target is asked to stop."""
GRACE_S = 5.0
"""How much longer a service may take to close what it has open."""

TARGET, DRAFT = family.NAMES

Found = TypeVar("Found")


def default_speculative_config(model: str) -> SpeculativeConfig:
    """The shipped target comes with a draft; for any other model nobody can know one."""
    if model == TARGET:
        return SpeculativeConfig(method="draft_model", model=DRAFT, beside=("ngram",), prompt_lookup_min=1)
    return SpeculativeConfig()


@dataclass(frozen=True, slots=True)
class Deployment:
    """One gateway, with its targets and drafts. Construct it with `plan_deployment`."""

    model: str
    served_model_name: str
    speculation: SpeculativeConfig
    engine: EngineConfig
    host: str
    port: int
    targets: dict[str, int]
    """Worker ids, and the port that each one keeps over restarts."""
    drafts: dict[str, int]
    metrics: dict[str, int]
    """By worker id: the port of its Prometheus metrics."""
    cores: dict[str, tuple[int, ...]]
    """By worker id: the CPU cores that belong to a target; none if they are shared."""
    advertised: dict[str, str] = field(default_factory=dict)
    """By worker id: where others are to reach a draft, if not where it listens."""
    rendezvous_ports: dict[str, int] = field(default_factory=dict)
    """By worker id: the port where its ranks meet, if several processes share its model."""
    api_keys: Path | None = None
    """Who may use the gateway; None: anyone."""
    grpc_port: int = 0
    """The gateway's, for gRPC clients; 0: any."""

    @property
    def target_cores(self) -> list[int]:
        """Those that are not for everybody."""
        return [core for cores in self.cores.values() for core in cores]

    @property
    def url(self) -> str:
        """Where this machine reaches the gateway."""
        host = LOOPBACK if self.host in ("", "0.0.0.0", "::") else self.host
        return f"http://{host}:{self.port}"

    def programs(self, redis_url: str) -> list[list[Program]]:
        """In the order in which they are to stop."""
        targets = [self._target(redis_url, index, *worker) for index, worker in enumerate(self.targets.items())]
        drafts = [self._draft(redis_url, index, *worker) for index, worker in enumerate(self.drafts.items())]
        return [[self._gateway(redis_url)], list(chain(*targets)), list(chain(*drafts))]

    def _gateway(self, redis_url: str) -> Program:
        names = ("--model", self.model, "--served-model-name", self.served_model_name)
        ports = ("--port", str(self.port), "--grpc-port", str(self.grpc_port))
        place = ("--host", self.host, *ports, "--redis-url", redis_url)
        keys = () if self.api_keys is None else ("--api-keys", str(self.api_keys))
        return _service("gateway", "gateway", *names, *place, *keys, "--drain-s", str(DRAIN_S), drain_s=DRAIN_S)

    def _target(self, redis_url: str, index: int, worker_id: str, port: int) -> list[Program]:
        names = ("--model", self.model, "--served-model-name", self.served_model_name)
        size = self.engine.tensor_parallel_size
        devices = _devices(self.engine.device, index, size)
        engine = self._rank_0_config(worker_id, size, devices, self.engine, {"cpus": self.cores[worker_id]})
        worker = self._worker(redis_url, worker_id, port, engine)
        rank_0 = _service("target", worker_id, *names, *worker, "--drain-s", str(DRAIN_S), drain_s=DRAIN_S)
        return [rank_0, *self._other_ranks(worker_id, devices)]

    def _draft(self, redis_url: str, index: int, worker_id: str, port: int) -> list[Program]:
        # The limit is the target's; a draft stops where its own model does. And it computes where there is room.
        changes: dict[str, object] = {"max_model_len": None, "cpus": ()}
        if self.target_cores:
            left = len(set(cpu_affinity.available()) - set(self.target_cores))
            changes["threads"] = max(1, min(self.engine.threads, left))
        named, size = self.speculation.draft_devices, self.speculation.draft_tensor_parallel_size
        devices = [named[(index * size + rank) % len(named)] if named else self.engine.device for rank in range(size)]
        engine = self._rank_0_config(worker_id, size, devices, self.engine, changes)
        advertised = ("--advertise", self.advertised[worker_id]) if worker_id in self.advertised else ()
        worker = self._worker(redis_url, worker_id, port, engine)
        rank_0 = _service("draft", worker_id, "--target-model", self.model, *worker, *advertised)
        return [rank_0, *self._other_ranks(worker_id, devices)]

    def _rank_0_config(
        self, worker_id: str, size: int, devices: Sequence[str], engine: EngineConfig, changes: Mapping[str, object]
    ) -> EngineConfig:
        """For rank 0 of so many."""
        port = self.rendezvous_ports.get(worker_id)
        ranks = {"tensor_parallel_size": size, "rendezvous": None if port is None else f"{LOOPBACK}:{port}"}
        return engine.model_copy(update={**changes, **ranks, "device": devices[0]})

    def _other_ranks(self, worker_id: str, devices: Sequence[str]) -> list[Program]:
        """The other ranks. They stop when rank 0 does: only it knows whether requests still run."""
        place = f"{LOOPBACK}:{self.rendezvous_ports.get(worker_id)}"
        return [
            _service(
                "rank",
                f"{worker_id}-rank-{rank}",
                *("--rendezvous", place, "--rank", str(rank), "--device", device),
                drain_s=DRAIN_S + GRACE_S,
            )
            for rank, device in enumerate(devices)
            if rank > 0
        ]

    def _worker(self, redis_url: str, worker_id: str, port: int, engine: EngineConfig) -> Sequence[str]:
        place = ("--host", LOOPBACK, "--port", str(port), "--metrics-port", str(self.metrics[worker_id]))
        name = ("--redis-url", redis_url, "--worker-id", worker_id)
        speculation = ("--speculative-config", self.speculation.model_dump_json())
        return (*place, *name, *speculation, "--engine-config", engine.model_dump_json())


@dataclass(frozen=True, slots=True)
class DeploymentOptions:
    """What the user asked for. `speculation` None: the default for the model."""

    model: str = TARGET
    speculation: SpeculativeConfig | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)
    host: str = LOOPBACK
    port: int = 0
    draft_workers: int = 1
    target_workers: int = 1
    served_model_name: str | None = None
    api_keys: Path | None = None


def plan_deployment(wish: DeploymentOptions) -> Deployment:
    """Everything decided and checked that can be before anything is started. Raises `ServiceStartError`."""
    speculation = wish.speculation or default_speculative_config(wish.model)
    model = _place(wish.model)
    speculation = _checked(speculation, model)
    own_drafts = speculation.enabled and speculation.method != POOL and speculation.draft_placement == "worker"
    draft_workers = wish.draft_workers if own_drafts else 0
    port, free = free_ports(wish.host, wish.port, 3 * (wish.target_workers + draft_workers))
    targets = _workers("target", free[: wish.target_workers])
    drafts = _workers("draft", free[wish.target_workers :][:draft_workers])
    workers = (*targets, *drafts)
    shared = [*(targets if wish.engine.tensor_parallel_size > 1 else ())]
    shared += drafts if speculation.draft_tensor_parallel_size > 1 else ()
    return Deployment(
        model=model,
        served_model_name=_served_name(model, wish.served_model_name),
        speculation=speculation,
        engine=wish.engine,
        host=wish.host,
        port=port,
        targets=targets,
        drafts=drafts,
        metrics=dict(zip(workers, free[len(workers) :], strict=False)),
        cores=dict(zip(targets, _cores(wish, model), strict=True)),
        rendezvous_ports=dict(zip(shared, free[2 * len(workers) :], strict=False)),
        api_keys=wish.api_keys,
    )


def free_ports(host: str, port: int, others: int) -> tuple[int, list[int]]:
    """The port, if it is free now, for 0 one that is; and so many other free ones on the loopback interface.

    All are held until the last is chosen: a port that is given back may be given again. Raises `ServiceStartError`.
    """
    with ExitStack() as held:

        def free(host: str, port: int) -> int:
            return int(held.enter_context(socket.create_server((host, port))).getsockname()[1])

        try:
            return free(host, port), [free(LOOPBACK, 0) for _ in range(others)]
        except OSError as error:
            raise StartError(
                f"cannot listen on {host}:{port} ({error.strerror}): choose another one with --port, or 0 for any"
            ) from error


def _checked(speculation: SpeculativeConfig, model: str) -> SpeculativeConfig:
    """With the draft's place resolved, and its method known. Raises `ServiceStartError` if it does not suit the
    target."""
    if not speculation.enabled:
        return speculation
    if speculation.model is not None:
        speculation = speculation.model_copy(update={"model": _place(speculation.model)})
    known = _completed(speculation, model)
    draft = known.model
    if draft is None:
        return known
    if known.vocabulary_mapping != "none":
        _check_mapping(draft, model, known)
    elif known.method in ("draft_model", "pard"):
        _check_vocabularies(draft, model)
    return known


def _completed(speculation: SpeculativeConfig, model: str) -> SpeculativeConfig:
    if speculation.method not in METHODS_READ_FROM_CHECKPOINT:
        return speculation  # without loading torch
    from paceline.drafting import complete_config

    try:
        return complete_config(speculation, model)
    except ValueError as error:
        raise StartError(str(error)) from error


def _check_vocabularies(draft: str, model: str) -> None:
    from paceline.text import vocabulary_fingerprint

    if _found(vocabulary_fingerprint, draft) != _found(vocabulary_fingerprint, model):
        raise StartError(
            f"the vocabularies of {Path(model).name} and its draft {Path(draft).name} differ: choose a draft that was "
            f'trained with the target\'s tokenizer, {MAPPING_HINT}, or {{"method": "ngram"}}, which needs none'
        )


def _check_mapping(draft: str, model: str, speculation: SpeculativeConfig) -> None:
    from paceline.drafting.vocabulary.vocabulary_mapping import Vocabulary, VocabularyMapping

    target, other = _found(Vocabulary.load, model), _found(Vocabulary.load, draft)
    try:
        mapping = VocabularyMapping.between(target, other)
        if speculation.vocabulary_mapping == "intersection":
            mapping.require_common()
    except ValueError as error:
        raise StartError(str(error)) from error


def _devices(device: str, index: int, size: int) -> list[str]:
    """Of the ranks of the target with this index. Plain `cuda`: each has a device of its own."""
    return [f"cuda:{index * size + rank}" if device == "cuda" and size > 1 else device for rank in range(size)]


def _cores(wish: DeploymentOptions, model: str) -> list[tuple[int, ...]]:
    """Each target's, as far as they are not the user's to choose.

    Without weights nothing is worth a core; and ranks that share a model wait for each other, wherever they run.
    """
    engine = wish.engine
    if engine.cpus is None and (is_fake_model(model) or engine.tensor_parallel_size > 1):
        return [()] * wish.target_workers
    if engine.cpus is not None or engine.device != "cpu":
        return [engine.cpus or ()] * wish.target_workers
    return cpu_affinity.cores_by_target(cpu_affinity.available(), wish.target_workers, engine.threads)


def _place(name: str) -> str:
    return _found(resolve_model, name)


def _found(look: Callable[[str], Found], name: str) -> Found:
    try:
        return look(name)
    except ModelNotFoundError as error:
        raise StartError(str(error)) from error


def _served_name(model: str, wanted: str | None) -> str:
    try:
        return served_name(model, wanted)
    except ValueError as error:
        raise StartError(str(error)) from error


def _workers(kind: str, ports: Sequence[int]) -> dict[str, int]:
    """Ids that no other deployment with the same Redis has, and the port of each."""
    mark = secrets.token_hex(2)
    return {f"{kind}-{number}-{mark}": port for number, port in enumerate(ports, 1)}


def _service(kind: str, name: str, *arguments: str, drain_s: float = 0.0) -> Program:
    return Program(name, (sys.executable, "-m", f"paceline_services.{kind}", *arguments), stop_s=drain_s + GRACE_S)
