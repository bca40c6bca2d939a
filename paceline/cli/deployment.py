"""Which services run on this machine and with which arguments, checked before any of them starts."""

from __future__ import annotations

import secrets
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path

from paceline import family
from paceline.cli import cpu_affinity
from paceline.cli.supervised_process import Program
from paceline.config import (
    LOOKUP_METHODS,
    MAPPING_HINT,
    METHODS_READ_FROM_CHECKPOINT,
    MODEL_METHODS,
    POOL,
    EngineConfig,
    SpeculativeConfig,
)
from paceline.config.sampling_params import GenerationConfig
from paceline.config.vllm_options import VllmOptions
from paceline.gguf.gguf_file import is_gguf
from paceline.host_port import listen_at_free_port
from paceline.launcher import StartError
from paceline.model_names import PUBLISHED, ModelNotFoundError, is_fake_model, resolve_model, served_name
from paceline.parsing.output_format import AUTO, NONE, TOOL_FORMATS
from paceline.parsing.reasoning import REASONING_FORMATS

LOOPBACK = "127.0.0.1"
DRAIN_S = 30.0
"""How long running requests may go on after the gateway or a target is asked to stop."""
GRACE_S = 5.0
"""How much longer a service may take to close its connections."""

TARGET, DRAFT = family.NAMES


def default_speculative_config(model: str) -> SpeculativeConfig:
    """The shipped target comes with a draft. For any other model what its texts repeat is looked up, in its process,
    beside the head that ships for it, if there is one."""
    if model == TARGET:
        return SpeculativeConfig(method="draft_model", model=DRAFT, beside=("ngram",), prompt_lookup_min=1)
    if is_fake_model(model):
        return SpeculativeConfig()
    if (head := family.PUBLISHED_HEADS.get(model)) is not None:
        return SpeculativeConfig(method="eagle3", model=head, beside=("suffix", "ngram"), draft_placement="target")
    return SpeculativeConfig(method="suffix", beside=("ngram",), draft_placement="target")


@dataclass(frozen=True, slots=True)
class DeploymentOptions:
    """The options of `paceline serve`."""

    model: str = TARGET
    speculation: SpeculativeConfig | None = None
    """None: the default for the model."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    host: str = LOOPBACK
    port: int = 0
    draft_workers: int = 1
    target_workers: int = 1
    served_model_name: str | None = None
    api_keys: Path | None = None
    """File of API keys for the gateway; None: it asks for none."""
    vllm: VllmOptions | None = None
    """How vLLM computes for the targets; None: our own engine does."""
    chat_template: str | None = None
    """A file, or the name of one of the model's templates; None: the model's own."""
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
    """How the model writes tool calls and reasoning; auto: as its chat template shows."""
    generation_config: GenerationConfig = "auto"
    """auto: requests have the sampling defaults of the model's generation_config.json; none: they do not."""
    otlp_traces_endpoint: str | None = None
    """The collector for all services' traces; None: as their environment says."""
    demo_page: bool = False
    """Whether the gateway's page may have a draft worker killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment(DeploymentOptions):
    """One gateway with its targets and drafts. `plan_deployment` makes it from the options."""

    speculation: SpeculativeConfig
    served_model_name: str
    targets: dict[str, int]
    """By worker id: the port, which a worker keeps over restarts."""
    drafts: dict[str, int]
    metrics: dict[str, int]
    """By worker id: the port of its Prometheus metrics."""
    cores: dict[str, tuple[int, ...]]
    """By worker id: the CPU cores reserved for a target; empty if it shares all cores."""
    advertised: dict[str, str] = field(default_factory=dict)
    """By worker id: the address at which targets reach a draft, if it differs from where it listens."""
    rendezvous_ports: dict[str, int] = field(default_factory=dict)
    """By worker id: the port where its ranks meet, if several processes share its model."""
    grpc_port: int = 0
    """The gateway's gRPC port; 0: any."""

    @property
    def target_cores(self) -> list[int]:
        """All cores reserved for targets."""
        return [core for cores in self.cores.values() for core in cores]

    @property
    def url(self) -> str:
        """The gateway's URL on this machine."""
        host = LOOPBACK if self.host in ("", "0.0.0.0", "::") else self.host
        return f"http://{host}:{self.port}"

    def programs(self, redis_url: str, demo_socket: Path | None = None) -> list[list[Program]]:
        """Groups of programs in the order in which they are to stop. `demo_socket`: for the gateway of a demo."""
        targets = (self._target(redis_url, index, worker_id) for index, worker_id in enumerate(self.targets))
        drafts = (self._draft(redis_url, index, worker_id) for index, worker_id in enumerate(self.drafts))
        return [[self._gateway(redis_url, demo_socket)], list(chain(*targets)), list(chain(*drafts))]

    @property
    def drafts_named(self) -> str:
        """The methods that draft, with the name of the draft model if there is one."""
        if not self.speculation.enabled:
            return "none"
        model = () if self.speculation.model is None else (f"({Path(self.speculation.model).name})",)
        return ", ".join((" ".join((self.speculation.method, *model)), *self.speculation.beside))

    @property
    def _names(self) -> tuple[str, ...]:
        return ("--model", self.model, "--served-model-name", self.served_model_name)

    @property
    def _traces(self) -> tuple[str, ...]:
        return () if self.otlp_traces_endpoint is None else ("--otlp-traces-endpoint", self.otlp_traces_endpoint)

    def _gateway(self, redis_url: str, demo_socket: Path | None) -> Program:
        address = ("--host", self.host, "--port", str(self.port), "--grpc-port", str(self.grpc_port))
        keys = () if self.api_keys is None else ("--api-keys", str(self.api_keys))
        demo = () if demo_socket is None else ("--demo-socket", str(demo_socket))
        parsers = ("--tool-call-parser", self.tool_call_parser, "--reasoning-parser", self.reasoning_parser)
        template = () if self.chat_template is None else ("--chat-template", self.chat_template)
        formats = (*template, *parsers, "--generation-config", self.generation_config)
        options = (*self._names, *address, "--redis-url", redis_url, *keys, *demo, *formats, *self._traces)
        return _service("gateway", "gateway", *options, "--drain-s", str(DRAIN_S), drain_s=DRAIN_S)

    def _target_devices(self, index: int) -> list[str]:
        """Of the ranks of a target. Plain `cuda`: each rank has a device of its own."""
        device, size = self.engine.device, self.engine.tensor_parallel_size
        own = device == "cuda" and size > 1
        return [f"cuda:{index * size + rank}" if own else device for rank in range(size)]

    def _draft_devices(self, index: int) -> list[str]:
        named, size = self.speculation.draft_devices, self.speculation.draft_tensor_parallel_size
        return [named[(index * size + rank) % len(named)] if named else self.engine.device for rank in range(size)]

    @property
    def shared_accelerators(self) -> list[str]:
        """Accelerators on which both targets and draft workers compute: one process at a time."""
        if self.speculation.method in LOOKUP_METHODS:  # they compute on the CPU
            return []
        targets = {_numbered(device) for index in range(len(self.targets)) for device in self._target_devices(index)}
        drafts = {_numbered(device) for index in range(len(self.drafts)) for device in self._draft_devices(index)}
        return sorted((targets & drafts) - {"cpu"})

    def _workers_on(self, devices: Sequence[str]) -> tuple[int, int]:
        """Processes of targets and of drafts on the fullest of these devices."""
        every = ((len(self.targets), self._target_devices), (len(self.drafts), self._draft_devices))
        targets, drafts = (Counter(_numbered(d) for i in range(n) for d in of(i)) for n, of in every)
        fullest = max(map(_numbered, devices), key=lambda device: targets[device] + drafts[device])
        return targets[fullest], drafts[fullest]

    def _target(self, redis_url: str, index: int, worker_id: str) -> list[Program]:
        devices = self._target_devices(index)
        engine = self.engine.model_copy(
            update={"cpus": self.cores[worker_id], "device_workers": self._workers_on(devices)}
        )
        options = [*self._names, "--port", str(self.targets[worker_id]), "--drain-s", str(DRAIN_S)]
        if self.vllm is not None:
            devices, engine = [self.engine.device], self.engine  # it starts its ranks itself
            options += ["--engine", "vllm", "--vllm-options", self.vllm.model_dump_json()]
        return self._worker("target", worker_id, redis_url, devices, engine, *options, drain_s=DRAIN_S)

    def _draft(self, redis_url: str, index: int, worker_id: str) -> list[Program]:
        # `max_model_len` limits the target; a draft has its own. A draft computes on the cores that targets leave.
        size = self.speculation.draft_tensor_parallel_size
        changes: dict[str, object] = {"max_model_len": None, "cpus": (), "tensor_parallel_size": size}
        if self.target_cores:
            left = len(set(cpu_affinity.available()) - set(self.target_cores))
            changes["threads"] = max(1, min(self.engine.threads, left))
        devices = self._draft_devices(index)
        changes["device_workers"] = self._workers_on(devices)
        engine = self.engine.model_copy(update=changes)
        advertised = ("--advertise", self.advertised[worker_id]) if worker_id in self.advertised else ()
        options = ("--target-model", self.model, "--port", str(self.drafts[worker_id]), *advertised)
        return self._worker("draft", worker_id, redis_url, devices, engine, *options)

    def _worker(
        self,
        kind: str,
        worker_id: str,
        redis_url: str,
        devices: Sequence[str],
        engine: EngineConfig,
        *options: str,
        drain_s: float = 0.0,
    ) -> list[Program]:
        """Rank 0, which is the worker, and the other ranks that share its model, one per further device.

        The others stop when rank 0 does: only rank 0 knows whether requests still run.
        """
        port = self.rendezvous_ports.get(worker_id)
        rendezvous = None if port is None else f"{LOOPBACK}:{port}"
        rank_0_only = {"rendezvous": rendezvous, "device": devices[0]}
        rank_0 = _service(
            kind,
            worker_id,
            *("--host", LOOPBACK, "--metrics-port", str(self.metrics[worker_id])),
            *("--redis-url", redis_url, "--worker-id", worker_id),
            *("--speculative-config", self.speculation.model_dump_json()),
            *("--engine-config", engine.model_copy(update=rank_0_only).model_dump_json()),
            *self._traces,
            *options,
            drain_s=drain_s,
        )
        others = [
            _service(
                "rank",
                f"{worker_id}-rank-{rank}",
                *("--rendezvous", str(rendezvous), "--rank", str(rank), "--device", device),
                drain_s=DRAIN_S + GRACE_S,
            )
            for rank, device in enumerate(devices[1:], 1)
        ]
        return [rank_0, *others]


def plan_deployment(options: DeploymentOptions) -> Deployment:
    """Decide everything that can be decided before a service starts. Raises `StartError` if it cannot work."""
    try:
        model = resolve_model(options.model)
        if options.vllm is not None and is_gguf(model):
            raise StartError(f"{model} is a GGUF file, which vLLM is not given here: name a folder with safetensors")
        speculation = _checked(options.speculation or _default(options), model)
        wanted = options.served_model_name or (options.model if options.model in PUBLISHED else None)
        name = served_name(model, wanted)
    except (ValueError, ModelNotFoundError) as error:
        raise StartError(str(error)) from error
    _check_name("--tool-call-parser", options.tool_call_parser, TOOL_FORMATS)
    _check_name("--reasoning-parser", options.reasoning_parser, REASONING_FORMATS)
    own_drafts = speculation.enabled and speculation.method != POOL and speculation.draft_placement == "worker"
    draft_workers = options.draft_workers if own_drafts else 0
    port, free = free_ports(options.host, options.port, 3 * (options.target_workers + draft_workers))
    targets = _workers("target", free[: options.target_workers])
    drafts = _workers("draft", free[options.target_workers :][:draft_workers])
    workers = (*targets, *drafts)
    shared = [*(targets if options.engine.tensor_parallel_size > 1 and options.vllm is None else ())]
    shared += drafts if speculation.draft_tensor_parallel_size > 1 else ()
    planned = replace(
        options, model=model, speculation=speculation, served_model_name=name, port=port, draft_workers=draft_workers
    )
    return Deployment(
        **{each.name: getattr(planned, each.name) for each in fields(planned)},
        targets=targets,
        drafts=drafts,
        metrics=dict(zip(workers, free[len(workers) :], strict=False)),
        cores=dict(zip(targets, _cores(options, model), strict=True)),
        rendezvous_ports=dict(zip(shared, free[2 * len(workers) :], strict=False)),
    )


def _default(options: DeploymentOptions) -> SpeculativeConfig:
    """vLLM takes drafts from workers alone; a demo page kills a worker, without which nothing drafts."""
    default = default_speculative_config(options.model)
    if default.draft_placement == "worker":
        return default
    if options.vllm is not None:
        return SpeculativeConfig()
    return SpeculativeConfig(method=default.method, model=default.model) if options.demo_page else default


def _numbered(device: str) -> str:
    """`cuda` is the first device."""
    return "cuda:0" if device == "cuda" else device


def _check_name(option: str, name: str, formats: Iterable[str]) -> None:
    """Raises `StartError` for a format that does not exist."""
    if name not in (names := (AUTO, NONE, *formats)):
        raise StartError(f"{option} {name}: choose one of {', '.join(names)}")


def free_ports(host: str, port: int, others: int) -> tuple[int, list[int]]:
    """`port` at `host`, or for 0 a free one; and `others` free ports on the loopback interface.

    All are held until the last is chosen. Raises `StartError` if `port` is taken.
    """
    with ExitStack() as held:

        def listen(host: str, port: int) -> socket.socket:
            return held.enter_context(socket.create_server((host, port)))

        def free(host: str) -> int:
            return int(listen_at_free_port(lambda port: listen(host, port)).getsockname()[1])

        try:
            if port:
                listen(host, port)
            return port or free(host), [free(LOOPBACK) for _ in range(others)]
        except OSError as error:
            raise StartError(
                f"cannot listen on {host}:{port} ({error.strerror}): choose another one with --port, or 0 for any"
            ) from error


def _checked(speculation: SpeculativeConfig, model: str) -> SpeculativeConfig:
    """With the draft's folder resolved and its method known.

    Raises ValueError or `ModelNotFoundError` if it cannot draft for the target. torch is only imported for methods
    that the checkpoint has to tell.
    """
    if not speculation.enabled:
        return speculation
    if speculation.model is not None:
        speculation = speculation.model_copy(update={"model": resolve_model(speculation.model)})
    if speculation.method in METHODS_READ_FROM_CHECKPOINT:
        from paceline.drafting import complete_config

        speculation = complete_config(speculation, model)
    draft = speculation.model
    if draft is None:
        return speculation
    if speculation.vocabulary_mapping != "none":
        from paceline.drafting.vocabulary.vocabulary_mapping import Vocabulary, VocabularyMapping

        mapping = VocabularyMapping.between(Vocabulary.load(model), Vocabulary.load(draft))
        if speculation.vocabulary_mapping == "intersection":
            mapping.require_common()
    elif speculation.method in MODEL_METHODS:
        from paceline.text import vocabulary_fingerprint

        if vocabulary_fingerprint(draft) != vocabulary_fingerprint(model):
            raise ValueError(
                f"the vocabularies of {Path(model).name} and its draft {Path(draft).name} differ: choose a draft that "
                f'was trained with the target\'s tokenizer, {MAPPING_HINT}, or {{"method": "ngram"}}, which needs none'
            )
    return speculation


def _cores(options: DeploymentOptions, model: str) -> list[tuple[int, ...]]:
    """The reserved cores of each target: those of the configuration, or chosen here.

    None are chosen for a fake model, which computes nothing, nor for ranks that share a model and wait for each other,
    nor for vLLM, which binds its threads itself.
    """
    engine, targets = options.engine, options.target_workers
    if options.vllm is not None:
        return [engine.cpus or ()] * targets
    if engine.cpus is not None:
        return [engine.cpus] * targets
    if is_fake_model(model) or engine.tensor_parallel_size > 1 or engine.device != "cpu":
        return [()] * targets
    return cpu_affinity.cores_by_target(cpu_affinity.available(), targets, engine.threads)


def _workers(kind: str, ports: Sequence[int]) -> dict[str, int]:
    """Worker ids, unique among all deployments with the same Redis, and their ports."""
    suffix = secrets.token_hex(2)
    return {f"{kind}-{number}-{suffix}": port for number, port in enumerate(ports, 1)}


def _service(kind: str, name: str, *options: str, drain_s: float = 0.0) -> Program:
    return Program(name, (sys.executable, "-m", f"paceline_services.{kind}", *options), stop_s=drain_s + GRACE_S)
