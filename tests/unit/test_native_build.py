"""How the native pass is compiled, kept and loaded, and every way in which that fails; a small library stands in."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.model.native import build
from paceline.model.native.build import Compiler, NativeUnavailableError
from tests.helpers.compilers import ASK, FakeCompiler, real_compiler, write_sources

V4 = build._AVX512
X86_OF_2011 = frozenset({"fpu", "sse2", "ssse3", "avx"})
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that a real compiler made."""
    compiler = real_compiler()
    sources = write_sources(tmp_path_factory.mktemp("sources"))
    return build.compile_library(sources, build._isas()[0], compiler, tmp_path_factory.mktemp("compiled"), "test")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return write_sources(tmp_path / "sources")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for libraries, not created yet."""
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("PACELINE_NATIVE", "PACELINE_NATIVE_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path / "cache" / "native"
    build._library_or_reason.cache_clear()


@pytest.fixture
def fake(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    compiler = FakeCompiler(tmp_path / "fake-c++", library)
    monkeypatch.setenv("CXX", str(compiler.path))
    return compiler


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.setitem(sys.modules, "ziglang", None)


def ask(sources: Path) -> int:
    """Load the library as a new process would, and call it."""
    build._library_or_reason.cache_clear()
    return int(build.native_library(sources).answer())


def start_asking(sources: Path) -> subprocess.Popen[str]:
    """The same in another process, which prints the result."""
    return subprocess.Popen(
        [sys.executable, "-c", ASK, str(sources), build.__file__], stdout=subprocess.PIPE, text=True
    )


def failure(sources: Path) -> str:
    build._library_or_reason.cache_clear()
    with pytest.raises(NativeUnavailableError) as caught:
        build.native_library(sources)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def libraries(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.so"))


@pytest.mark.parametrize("umask", [0o022, 0])
def test_a_real_compiler_compiles_once(
    sources: Path, cache: Path, library: Path, caplog: pytest.LogCaptureFixture, umask: int
) -> None:
    caplog.set_level(logging.INFO)
    before = os.umask(umask)
    try:
        assert ask(sources) == ask(sources) == 42
    finally:
        os.umask(before)
    assert [record.getMessage() for record in caplog.records] == ["compiling the native pass"]
    assert [path.stat().st_mode & 0o777 for path in (*libraries(cache), cache, cache.parent)] == [0o700] * 3
    isa, compiler, source = build.native_description(sources).split(", ")
    assert isa == build._isas()[0].name
    assert compiler.partition(" ")[0] in ("g++", "clang")
    assert source == f"source {build.source_hash(sources)[:8]}"


def test_once_per_process(sources: Path, fake: FakeCompiler) -> None:
    assert build.native_library(sources) is build.native_library(sources)
    fake.behave(before="exit 1")
    other = write_sources(sources.parent / "other", 44)
    for _ in range(2):
        with pytest.raises(NativeUnavailableError):
            build.native_library(other)
    assert fake.compiled == 2


def test_sources_flags_and_compilers_make_another_library(
    sources: Path, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    ask(sources)
    calls = fake.calls
    ask(sources)
    assert fake.calls == calls  # a library in the cache runs no compiler
    assert build.native_description(sources).endswith(f", g++ 1.2.3, source {build.source_hash(sources)[:8]}")
    monkeypatch.setenv("PACELINE_NATIVE_FLAGS", "-O1 '-DNAME=two words'")
    ask(sources)
    assert all(" -O1 -DNAME=two words " in call for call in fake.calls[-2:])  # to compile, and to link
    os.utime(fake.path, ns=(1, 1))  # a new version in its place
    ask(sources)
    write_sources(sources, 43)
    ask(sources)
    assert fake.compiled == len(libraries(cache)) == 4


def test_switched_off(sources: Path, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(sources) == 42
    monkeypatch.setenv("PACELINE_NATIVE", "0")
    assert "PACELINE_NATIVE" in failure(sources)


@pytest.mark.usefixtures("no_compiler")
def test_no_compiler(sources: Path) -> None:
    assert "no C++ compiler" in failure(sources)


@pytest.mark.usefixtures("no_compiler")
def test_the_ziglang_wheel_is_the_last_compiler(
    sources: Path, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang" / "__init__.py").touch()
    fake.path.rename(tmp_path / "ziglang" / "zig")
    monkeypatch.delenv("CXX")
    monkeypatch.delitem(sys.modules, "ziglang")
    monkeypatch.syspath_prepend(tmp_path)
    assert ask(sources) == 42
    assert {call.split()[0] for call in fake.calls} == {"c++"}
    assert any(f"-mcpu={build._isas()[0].zig}" in call for call in fake.calls)


def test_a_prebuilt_library_needs_no_compiler(sources: Path, library: Path, no_compiler: None) -> None:
    (sources / "ready").mkdir()
    content = library.read_bytes()
    parts = [build._isas()[0].name, "clang-1.2", build.source_hash(sources), "ready", build._digest(content)]
    (sources / "ready" / f"{'--'.join(parts)}.so").write_bytes(content)
    assert ask(sources) == 42
    assert build.native_description(sources) == f"{parts[0]}, clang 1.2, source {parts[2][:8]}"
    write_sources(sources, 43)  # the library was made of other sources
    assert "no C++ compiler" in failure(sources)


@pytest.mark.parametrize("fault", ["a file is in the way", "no new folder", "read-only", "no home"])
def test_a_library_that_cannot_be_kept(
    sources: Path, fake: FakeCompiler, fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    (tmp_path / "file").touch()
    if fault == "a file is in the way":
        monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    elif fault == "no new folder":
        monkeypatch.setenv("PACELINE_CACHE_DIR", "/proc/cache")
    elif fault == "read-only":  # root may write everywhere; the lock is the first file that is opened
        (build.cache_folder() / "lock").mkdir()
    else:
        for name in ("PACELINE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(os, "getuid", lambda: 987654)  # not in the system's list of users
    assert "set PACELINE_CACHE_DIR to a folder" in failure(sources)
    assert libraries(cache) == []
    assert fake.compiled == 0


def test_a_library_in_a_read_only_cache_is_loaded(sources: Path, fake: FakeCompiler, cache: Path) -> None:
    ask(sources)
    (cache / "lock").unlink()
    (cache / "lock").mkdir()
    assert ask(sources) == 42


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.cache_folder() == tmp_path / "xdg" / "paceline" / "native"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert build.cache_folder() == tmp_path / "home" / ".cache" / "paceline" / "native"


def test_a_compiler_that_fails(sources: Path, fake: FakeCompiler, cache: Path) -> None:
    fake.behave(before="echo In file included; echo 'x.hpp:7: error: no such thing' >&2; echo more; exit 1")
    assert failure(sources).endswith("fake-c++ failed: x.hpp:7: error: no such thing")
    fake.behave(before="exit 3")
    assert failure(sources).endswith("failed: status 3")
    assert libraries(cache) == []
    fake.path.write_bytes(b"\x7fELF nothing")
    assert "does not start" in failure(sources)


@pytest.mark.parametrize("write", [":", 'echo nothing > "$out"', ': > "$out"'])
def test_a_compiler_that_writes_no_library(sources: Path, fake: FakeCompiler, write: str) -> None:
    fake.behave(write=write)
    reason = failure(sources)
    assert "wrote no library" in reason or "does not load" in reason


def test_a_compiler_that_hangs(
    sources: Path, fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    fake.behave(before=f"sleep 600 & echo $$ $! > {tmp_path}/pids; wait")
    monkeypatch.setattr(build, "TIMEOUT_S", 2.0)
    assert "was not done after 2 s" in failure(sources)
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        until(lambda pid=pid: not is_running(pid))  # type: ignore[misc]
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_a_compiler_too_old_for_the_best_instruction_set(
    sources: Path, fake: FakeCompiler, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Then the next instruction set is compiled for. Any other failure would repeat with the next one."""
    best, older = build.Isa("best", frozenset(), ("-mbest",), ""), build.Isa("older", frozenset(), ("-mold",), "")
    monkeypatch.setattr(build, "_isas", lambda: [best, older])
    fake.behave(
        """case " $* " in *" -mbest "*) echo "g++: error: unrecognized command-line option '-mbest'"; exit 1; esac"""
    )
    assert ask(sources) == 42
    assert [path.name.partition("--")[0] for path in libraries(cache)] == ["older"]
    assert any("does not know" in record.getMessage() for record in caplog.records)
    write_sources(sources, 43)
    fake.behave("echo 'error: no space left'; exit 1")
    before = fake.compiled
    assert "no space left" in failure(sources)
    assert fake.compiled == before + 1


@pytest.mark.parametrize(
    ("machine", "flags", "isa"),
    [
        ("x86_64", V4 | {"avx512_bf16", "amx_tile", "amx_bf16"}, "amx"),
        ("x86_64", V4 | {"avx512_bf16", "amx_tile"}, "avx512_bf16"),
        ("x86_64", V4, "avx512"),
        ("x86_64", (V4 | {"avx512_bf16"}) - {"avx512vl"}, "avx2"),
        ("x86_64", build._AVX2, "avx2"),
        ("aarch64", frozenset(), "neon"),
        ("arm64", frozenset(), "neon"),
    ],
)
def test_the_best_instruction_set_of_a_cpu(machine: str, flags: frozenset[str], isa: str) -> None:
    assert build.isas_of(machine, flags)[0].name == isa


@pytest.mark.parametrize(
    ("machine", "flags", "reason"),
    [("x86_64", X86_OF_2011, "avx2"), ("x86_64", build._AVX2 - {"fma"}, "fma"), ("riscv64", frozenset(), "riscv64")],
)
def test_a_cpu_without_native_code_compiles_nothing(
    sources: Path,
    fake: FakeCompiler,
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    flags: frozenset[str],
    reason: str,
) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    monkeypatch.setattr(build, "cpu_flags", lambda: flags)
    assert reason in failure(sources)
    assert fake.calls == []


def test_flags_of_this_cpu() -> None:
    if build.platform.machine() == "x86_64":
        assert {"fpu", "sse2"} <= build.cpu_flags()


def test_machines_that_share_a_home_have_libraries_of_their_own(
    sources: Path, fake: FakeCompiler, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    for times, flags in enumerate([V4 | {"avx512_bf16"}, V4, build._AVX2], start=1):
        monkeypatch.setattr(build, "cpu_flags", lambda flags=flags: flags)
        assert ask(sources) == ask(sources) == 42
        assert build.native_description(sources).startswith(f"{build._isas()[0].name}, ")
        assert fake.compiled == times
    assert [path.name.split("--")[0] for path in libraries(cache)] == ["avx2", "avx512", "avx512_bf16"]
    assert ["-mavx512bf16" in call for call in fake.compilations] == [True, False, False]


def test_two_processes_at_once(sources: Path, fake: FakeCompiler, cache: Path) -> None:
    fake.behave(before="sleep 1")
    both = [start_asking(sources) for _ in range(2)]
    assert [process.communicate()[0] for process in both] == ["42\n", "42\n"]
    assert fake.compiled == len(libraries(cache)) == 1


def test_a_file_system_without_locks(
    sources: Path, fake: FakeCompiler, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(build.fcntl, "flock", no_locks)
    assert ask(sources) == 42


def test_a_process_that_dies_while_it_compiles(sources: Path, fake: FakeCompiler, tmp_path: Path, cache: Path) -> None:
    pid = tmp_path / "pid"
    fake.behave(before=f"echo $$ >> {pid}; sleep 600")
    first = start_asking(sources)
    until(lambda: pid.exists() and bool(pid.read_text()))
    first.kill()
    first.communicate()
    fake.behave()
    started = time.monotonic()
    assert ask(sources) == 42
    assert time.monotonic() - started < 30  # its compiler still runs, and holds no lock
    os.killpg(int(pid.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o1702])
def test_a_library_that_others_may_write_to(
    sources: Path, fake: FakeCompiler, cache: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    ask(sources)
    libraries(cache)[0].chmod(mode)
    for _ in range(2):  # the second time it finds the new library
        assert ask(sources) == 42
        assert fake.compiled == 2
    assert any("others may write" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("mode", [0o770, 0o707])
@pytest.mark.parametrize("above", [0, 1, 2])
def test_a_folder_that_others_may_write_to(
    sources: Path, fake: FakeCompiler, cache: Path, mode: int, above: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who can write to a folder above can replace this one."""
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(cache.parent / "deeper"))
    ask(sources)
    folder = (cache.parent / "deeper" / "native", cache.parent / "deeper", cache.parent)[above]
    folder.chmod(mode)
    assert f"others may write to {folder}" in failure(sources)
    folder.chmod(mode | 0o1000)  # sticky, such as /tmp: there only the owner can rename a file
    assert ask(sources) == 42


@needs_root
@pytest.mark.parametrize("above", [0, 1])
def test_a_folder_of_another_user(sources: Path, fake: FakeCompiler, cache: Path, above: int) -> None:
    ask(sources)
    os.chown((cache, cache.parent)[above], 12345, -1)
    assert "others may write" in failure(sources)


@needs_root
def test_a_library_of_another_user(sources: Path, fake: FakeCompiler, cache: Path) -> None:
    ask(sources)
    os.chown(libraries(cache)[0], 12345, -1)
    assert ask(sources) == 42
    assert fake.compiled == 2


@pytest.mark.parametrize("harm", ["empty", "truncated", "changed"])
def test_a_broken_library_is_compiled_again(sources: Path, fake: FakeCompiler, cache: Path, harm: str) -> None:
    """In another process: loading a truncated library may kill it."""
    ask(sources)
    (path,) = libraries(cache)
    content = path.read_bytes()
    path.unlink()  # this process has it mapped
    path.write_bytes(
        {"empty": b"", "truncated": content[: len(content) // 3], "changed": content.replace(b"answer", b"zzzzzz")}[
            harm
        ]
    )
    assert start_asking(sources).communicate()[0] == "42\n"
    assert fake.compiled == 2
    assert path.read_bytes() == content


def test_zig_is_found_in_commands_of_several_parts() -> None:
    assert Compiler(("/usr/bin/python", "-m", "ziglang", "c++")).is_zig
    assert not Compiler(("/usr/bin/ccache", "g++")).is_zig


@pytest.mark.parametrize(
    ("first", "version"),
    [
        ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0", "g++-12.2.0"),
        ("g++ (GCC) 13.2.1 20231205 (Red Hat 13.2.1-6)", "g++-13.2.1"),
        ("Debian clang version 14.0.6", "clang-14.0.6"),
        ("Apple clang version 15.0.0 (clang-1500.3.9.4)", "clang-15.0.0"),
        ("clang version 22.1.8", "clang-22.1.8"),
    ],
)
def test_versions(fake: FakeCompiler, first: str, version: str, tmp_path: Path) -> None:
    fake.path.write_text(f"#!/bin/sh\necho '{first}'; echo 'Target: none 7.7.7'\n")
    assert build._version(Compiler((str(fake.path),)), tmp_path) == version
