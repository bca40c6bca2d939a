"""`paceline serve` with a target of several ranks: they end together and start again together."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from queue import SimpleQueue

import httpx
import pytest
from torch import Tensor

from paceline.config import EngineConfig
from paceline.launcher import StartError
from paceline.model.parallel import rendezvous
from paceline.model.parallel.host_port import HostPort
from paceline.model.parallel.rank_errors import RankLostError, RendezvousError
from paceline.model.parallel.rendezvous import join_rank_group
from paceline.model.parallel.tensor_parallel_group import TensorParallelGroup
from paceline.model.rows import SlotTable
from paceline_services.service_entrypoint import FAILED
from paceline_services.target.engine_process import load_model
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.ranks import LOOPBACK, RankProcesses, free_address
from tests.helpers.served import Served, serving

pytestmark = pytest.mark.alone

BODY = {"prompt": "1 2 3", "max_tokens": 120, "temperature": 0.8, "seed": 7}
PATIENCE_S = 120.0
ROWS = [SlotTable([1]).row(5, 0)]
NGRAM = '{"method": "ngram", "prompt_lookup_min": 1}'


def test_a_replica_that_loses_a_rank_ends_and_starts_as_one(tmp_path: Path) -> None:
    """SIGKILL during a stream. A request before and one after have the same tokens."""
    arguments = (str(save_checkpoint(tmp_path)), "--port", "0", "--speculative-config", NGRAM)
    with serving(*arguments, "--tensor-parallel-size", "2") as served:
        url = served.wait_for(r"Serving \S+ at (\S+)/v1")[1]
        before = _text(url)
        for victim in (1, 0):
            first = _ranks(served)
            with httpx.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": True}, **CLIENT) as response:
                next(response.iter_lines())
                os.kill(first[1] if victim == 1 else _computing(first[0]), signal.SIGKILL)
                # The rank monitor notices it first, or the running pass.
                served.wait_for(
                    rf"rank {victim} is gone: the replica ends as a whole|rank {1 - victim} lost its replica"
                )
                served.wait_for(r"target ready on")
            _healthy(url)
            assert not set(_ranks(served)) & set(first)
            assert _text(url) == before
        served.process.send_signal(signal.SIGINT)
        served.wait_for(r"serve stopped")
        assert served.process.wait() == 0
        assert not [line for line in served.log if "did not stop" in line]


def test_a_rank_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "PASS_TIMEOUT_S", 1.0)
    with RankProcesses(1) as ranks, ranks.load(save_checkpoint(tmp_path), 2) as model:
        model.run(ROWS, [0])
        os.kill(ranks.pid(1), signal.SIGSTOP)
        with pytest.raises(RankLostError, match="rank 0 lost its replica"):
            model.run(ROWS, [0])


@pytest.mark.slow
def test_a_pass_that_was_interrupted_is_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank is still within the pass, and would take the next rows for a part of it."""
    with RankProcesses(1) as ranks, ranks.load(save_checkpoint(tmp_path), 2) as model:
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
    address = str(free_address())
    process = multiprocessing.get_context("spawn").Process(target=_fail, args=(address,), daemon=True)
    process.start()
    try:
        engine = EngineConfig(tensor_parallel_size=2, rendezvous=address)
        group = rendezvous.create_rank_group(rendezvous.RankConfig(model="none", engine=engine))
        try:
            assert lost.get(timeout=PATIENCE_S) == "rank 1 is gone"
        finally:
            group.abort()
    finally:
        process.kill()
        process.join()


@pytest.mark.skipif(os.environ.get("PACELINE_NATIVE") == "0", reason="native code is switched off")
def test_ranks_that_compute_in_different_ways_do_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_NATIVE", "0")
    with RankProcesses(1) as ranks:
        monkeypatch.delenv("PACELINE_NATIVE")
        message = r"rank 0 has \(native .*\) and rank 1 \(torch operators, .*\): start"
        with pytest.raises(RendezvousError, match=message), ranks.load(save_checkpoint(tmp_path), 2):
            pass
        assert ranks.exit_code(1) == FAILED


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.slow)])
def test_ranks_of_one_machine_listen_to_nobody_else(host: str, tmp_path: Path) -> None:
    try:
        free_address(host)
    except OSError:
        pytest.skip(f"{host} is not available")
    before = set(_listening(os.getpid()))
    with RankProcesses(1) as ranks, ranks.load(save_checkpoint(tmp_path), 2, host=host) as model:
        model.run(ROWS, [0])
        ours = set(_listening(os.getpid())) - before
        assert ours  # the rendezvous, at least
        for address, _ in ours | set(_listening(ranks.pid(1))):
            assert ip_address(address).is_loopback


def test_the_model_process_does_not_outlive_its_service(tmp_path: Path) -> None:
    """While it waits for the other ranks it does not read its pipe."""
    with _target(save_checkpoint(tmp_path), str(free_address())) as service:
        assert service.stdout is not None
        while "rank 0 waits at" not in (line := service.stdout.readline()):
            assert line
        computing = _computing(service.pid)
        service.kill()
        deadline = time.monotonic() + 5.0
        while _lives(computing):
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.slow
def test_a_rendezvous_in_use_is_not_a_permanent_failure(tmp_path: Path) -> None:
    with HostPort(LOOPBACK, 0).listen() as taken:
        address = HostPort(LOOPBACK, int(taken.getsockname()[1]))
        with _target(save_checkpoint(tmp_path), str(address)) as service:
            output, _ = service.communicate(timeout=PATIENCE_S)
    assert service.returncode == FAILED
    assert re.search(rf"rank 0 did not meet all 1 others at {address}: .*Address already in use", output)


def test_a_malformed_rendezvous_is_a_permanent_failure(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="rendezvous 'here' is not HOST:PORT"):
        load_model(str(save_checkpoint(tmp_path)), EngineConfig(tensor_parallel_size=2, rendezvous="here"))


def _target(folder: Path, rendezvous: str) -> subprocess.Popen[str]:
    """The service of a rank 0 without other ranks."""
    engine = EngineConfig(tensor_parallel_size=2, rendezvous=rendezvous).model_dump_json()
    command = [sys.executable, "-m", "paceline_services.target", "--model", str(folder), "--engine-config", engine]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _out_of_memory(ranks: TensorParallelGroup, part: Tensor) -> Tensor:
    raise MemoryError


def _fail(rendezvous: str) -> None:
    with join_rank_group(rendezvous, 1, None):
        raise MemoryError


def _lives(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


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
    """Process ids, by rank."""
    return [
        pid for kind in ("paceline_services.target", "paceline_services.rank") for pid in served.children(kind).values()
    ]


CLIENT = {"trust_env": False, "timeout": PATIENCE_S}


def _text(url: str) -> str:
    return str(httpx.post(f"{url}/v1/completions", json=BODY, **CLIENT).raise_for_status().json()["choices"][0]["text"])


def _healthy(url: str) -> None:
    """Wait until the gateway is healthy."""
    deadline = time.monotonic() + PATIENCE_S
    while not httpx.get(f"{url}/health", **CLIENT).is_success:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _computing(service: int) -> int:
    """A target's model process."""
    [child] = Path(f"/proc/{service}/task/{service}/children").read_text().split()
    return int(child)
