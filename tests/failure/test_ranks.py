"""A model of several ranks: they end together, and `paceline serve` starts them again together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import SimpleQueue

import httpx
import pytest
from torch import Tensor

from paceline.cli.process_tree import process_and_descendants
from paceline.config import EngineConfig
from paceline.host_port import HostPort, free_address
from paceline.launcher import FAILED, StartError
from paceline.model.loading import load_shard
from paceline.model.model_loader import load
from paceline.model.parallel import RankLostError, RendezvousError, rendezvous
from paceline.model.parallel.rendezvous import RankConfig, create_rank_group, join_rank_group
from paceline.model.parallel.tensor_parallel_group import TensorParallelGroup
from paceline.model.rows import SlotTable
from paceline_services.target.engine_process import load_model
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.ranks import LOOPBACK, RankProcesses
from tests.helpers.served import Served, serving

PATIENCE_S = 120.0
ROWS = [SlotTable([1]).row(5, 0)]
NGRAM = '{"method": "ngram", "prompt_lookup_min": 1, "draft_placement": "target"}'
BODY = {"prompt": "1 2 3", "max_tokens": 120, "temperature": 0.8, "seed": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"))


def test_a_replica_that_loses_a_rank_ends_and_starts_as_one(folder: Path) -> None:
    """SIGKILL during a stream. A request before and one after have the same tokens."""
    arguments = (str(folder), "--port", "0", "--speculative-config", NGRAM, "--tensor-parallel-size", "2")
    with serving(*arguments) as served:
        url = served.wait_for(r"Serving \S+ at (\S+)/v1")[1]
        with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE_S) as http:
            before = _text(http)
            for victim in (1, 0):
                first = _ranks(served)
                with http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
                    next(response.iter_lines())
                    *_, computing = process_and_descendants(first[victim])
                    os.kill(computing, signal.SIGKILL)
                    # The rank monitor notices it first, or the running pass.
                    served.wait_for(
                        rf"rank {victim} is gone: the replica ends as a whole|rank {1 - victim} lost its replica"
                    )
                    served.wait_for(r"target ready on")
                deadline = time.monotonic() + PATIENCE_S
                while not http.get("/health").is_success:
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
                assert not set(_ranks(served)) & set(first)
                assert _text(http) == before
        served.process.send_signal(signal.SIGINT)
        served.wait_for(r"serve stopped")
        assert served.process.wait() == 0
        assert not [line for line in served.log if "did not stop" in line]


def test_a_rank_that_hangs_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "PASS_TIMEOUT_S", 1.0)
    with RankProcesses(1) as ranks, ranks.load(folder, 2) as model:
        model.run(ROWS, [0])
        os.kill(ranks.pid(1), signal.SIGSTOP)
        with pytest.raises(RankLostError, match="rank 0 lost its replica"):
            model.run(ROWS, [0])


def test_a_pass_that_was_interrupted_is_the_last(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank is still within the pass, and would take the next rows for a part of it."""
    with RankProcesses(1) as ranks, ranks.load(folder, 2) as model:
        model.run(ROWS, [0])
        with monkeypatch.context() as patch:
            patch.setattr(TensorParallelGroup, "_gathered", _out_of_memory)
            with pytest.raises(MemoryError):
                model.run(ROWS, [0])
        began = time.monotonic()
        with pytest.raises(RankLostError, match="rank 0 has lost its replica already"):
            model.run(ROWS, [0])
        assert time.monotonic() - began < 1.0
        assert ranks.exit_code(1) == FAILED


def test_a_rank_that_fails_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed rank once ended in order, as after the last pass."""
    lost: SimpleQueue[str] = SimpleQueue()
    monkeypatch.setattr(rendezvous, "exit_process", lost.put)
    address = str(free_address(LOOPBACK))
    with _rank_one(_fail, address):
        group = create_rank_group(_config(address))
        try:
            assert lost.get(timeout=PATIENCE_S) == "rank 1 is gone"
        finally:
            group.abort()


@pytest.mark.skipif(os.environ.get("PACELINE_NATIVE") == "0", reason="native code is switched off")
def test_ranks_that_compute_in_different_ways_do_not_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "exit_process", lambda reason: None)
    address = str(free_address(LOOPBACK))
    with _rank_one(_load_without_native_code, address) as process:
        message = r"rank 0 has \(native .*\) and rank 1 \(torch operators, .*\): start"
        with pytest.raises(RendezvousError, match=message):
            load(str(folder), _config(address).engine)
        process.join(PATIENCE_S)
        assert process.exitcode == FAILED


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_ranks_of_one_machine_listen_to_nobody_else(host: str, folder: Path) -> None:
    try:
        free_address(host)
    except OSError:
        pytest.skip(f"{host} is not available")
    before = set(_listening(os.getpid()))
    with RankProcesses(1) as ranks, ranks.load(folder, 2, host=host) as model:
        model.run(ROWS, [0])
        ours = set(_listening(os.getpid())) - before
        assert ours  # the rendezvous, at least
        for address, _ in ours | set(_listening(ranks.pid(1))):
            assert ip_address(address).is_loopback


def test_a_rendezvous_in_use_is_named() -> None:
    with HostPort(LOOPBACK, 0).listen() as taken:
        address = f"{LOOPBACK}:{taken.getsockname()[1]}"
        with pytest.raises(RendezvousError, match=f"rank 0 did not meet all 1 others at {address}: .*already in use"):
            create_rank_group(_config(address))


def test_a_malformed_rendezvous_is_a_permanent_failure(folder: Path) -> None:
    with pytest.raises(StartError, match="rendezvous 'here' is not HOST:PORT"):
        load_model(str(folder), _config("here").engine)


def _config(rendezvous: str) -> RankConfig:
    return RankConfig(model="none", engine=EngineConfig(tensor_parallel_size=2, rendezvous=rendezvous))


def _out_of_memory(ranks: TensorParallelGroup, part: Tensor) -> Tensor:
    raise MemoryError


@contextmanager
def _rank_one(run: Callable[[str], None], rendezvous: str) -> Iterator[BaseProcess]:
    """A process that is rank 1."""
    process = multiprocessing.get_context("forkserver").Process(target=run, args=(rendezvous,), daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def _fail(rendezvous: str) -> None:
    with join_rank_group(rendezvous, 1, None):
        raise MemoryError


def _load_without_native_code(rendezvous: str) -> None:
    os.environ["PACELINE_NATIVE"] = "0"
    with join_rank_group(rendezvous, 1, None) as (ranks, config):
        load_shard(config.model, config.engine, ranks)


def _listening(pid: int) -> Iterator[tuple[str, int]]:
    """Addresses and ports that a process listens on."""
    own = {_link(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                address, _, port = local.partition(":")
                numbers = array("I", bytes.fromhex(address))
                numbers.byteswap()
                yield str(ip_address(numbers.tobytes())), int(port, 16)


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:  # closed meanwhile
        return ""


def _ranks(served: Served) -> list[int]:
    """Process ids of the services, by rank. The last descendant of one computes."""
    return [pid for kind in ("target", "rank") for pid in served.children(f"paceline_services.{kind}").values()]


def _text(http: httpx.Client) -> str:
    return str(http.post("/v1/completions", json=BODY).raise_for_status().json()["choices"][0]["text"])
