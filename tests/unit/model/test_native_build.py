"""How the native pass is compiled, kept and loaded, and every way in which that fails; a small library stands in."""

from __future__ import annotations

import logging
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.cache_folder import cache_folder
from paceline.model.native import build
from paceline.model.native.build import Compiler, NativeUnavailableError
from tests.helpers.compilers import ASK, FakeCompiler, real_compiler, write_sources

NEEDS = {isa.name: isa.needs for isa in build.ISAS["x86_64"]}
AVX2, AVX512, AVX512_BF16, AMX = (NEEDS[name] for name in ("avx2", "avx512", "avx512_bf16", "amx"))
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that a real compiler made."""
    compiler, isa = real_compiler(), build.isas_of(platform.machine(), build.cpu_flags())[0]
    sources = write_sources(tmp_path_factory.mktemp("sources"))
    return build.compile_library(sources, isa, compiler, tmp_path_factory.mktemp("compiled"), "test")


@dataclass
class NativeFake:
    """Sources, a compiler that copies a library, and the folder for libraries, not created yet."""

    sources: Path
    cache: Path
    compiler: FakeCompiler

    def ask(self) -> int:
        """Load the library as a new process would, and call it."""
        build._library_or_reason.cache_clear()
        return int(build.native_library(self.sources).answer())

    def failure(self) -> str:
        build._library_or_reason.cache_clear()
        with pytest.raises(NativeUnavailableError) as caught:
            build.native_library(self.sources)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def libraries(self) -> list[Path]:
        return sorted(self.cache.glob("*.so"))


@pytest.fixture
def native(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> NativeFake:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "above" / "cache"))
    for name in ("PACELINE_NATIVE", "PACELINE_NATIVE_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    compiler = FakeCompiler(tmp_path / "fake-c++", library)
    monkeypatch.setenv("CXX", str(compiler.path))
    return NativeFake(write_sources(tmp_path / "sources"), tmp_path / "above" / "cache" / "native", compiler)


@pytest.fixture
def no_compiler(native: NativeFake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.setitem(sys.modules, "ziglang", None)


def start_asking(sources: Path) -> subprocess.Popen[str]:
    """The same in another process, which prints the result."""
    argv = [sys.executable, "-c", ASK, str(sources), build.__file__]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# What is compiled, and when


@pytest.mark.parametrize("umask", [0o022, 0])
def test_a_real_compiler_compiles_once(
    native: NativeFake, library: Path, caplog: pytest.LogCaptureFixture, umask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX")
    caplog.set_level(logging.INFO)
    before = os.umask(umask)
    try:
        assert native.ask() == native.ask() == 42
    finally:
        os.umask(before)
    assert [record.getMessage() for record in caplog.records] == ["compiling the native pass"]
    kept = (*native.libraries(), native.cache, native.cache.parent)
    assert [path.stat().st_mode & 0o777 for path in kept] == [0o700] * 3
    isa, compiler, source = build.native_description(native.sources).split(", ")
    assert isa == library.name.partition("--")[0]
    assert compiler.partition(" ")[0] in ("g++", "clang")
    assert source == f"source {build.source_hash(native.sources)[:8]}"


def test_a_process_tries_once(native: NativeFake) -> None:
    build._library_or_reason.cache_clear()
    assert build.native_library(native.sources) is build.native_library(native.sources)
    native.compiler.behave(before="exit 1")
    other = write_sources(native.sources.parent / "other", 44)
    for _ in range(2):
        with pytest.raises(NativeUnavailableError):
            build.native_library(other)
    assert native.compiler.compiled == 2


def test_sources_flags_and_compilers_make_another_library(native: NativeFake, monkeypatch: pytest.MonkeyPatch) -> None:
    native.ask()
    calls = native.compiler.calls
    native.ask()
    assert native.compiler.calls == calls  # a library in the cache runs no compiler
    monkeypatch.setenv("PACELINE_NATIVE_FLAGS", "-O1 '-DNAME=two words'")
    native.ask()
    assert all(" -O1 -DNAME=two words " in call for call in native.compiler.calls[-2:])  # to compile, and to link
    os.utime(native.compiler.path, ns=(1, 1))  # a new version in its place
    native.ask()
    write_sources(native.sources, 43)
    native.ask()
    assert native.compiler.compiled == len(native.libraries()) == 4


def test_it_can_be_switched_off(native: NativeFake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_NATIVE", "0")
    assert "PACELINE_NATIVE" in native.failure()
    assert native.compiler.calls == []


@pytest.mark.usefixtures("no_compiler")
def test_the_ziglang_wheel_is_the_last_compiler(
    native: NativeFake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang" / "__init__.py").touch()
    native.compiler.path.rename(tmp_path / "ziglang" / "zig")
    monkeypatch.delenv("CXX")
    assert "no C++ compiler" in native.failure()
    monkeypatch.delitem(sys.modules, "ziglang")
    monkeypatch.syspath_prepend(tmp_path)
    assert native.ask() == 42
    assert {call.split()[0] for call in native.compiler.calls} == {"c++"}
    assert any("-mcpu=" in call for call in native.compiler.calls)


def test_zig_is_found_in_commands_of_several_parts() -> None:
    assert Compiler(("/usr/bin/python", "-m", "ziglang", "c++")).is_zig
    assert not Compiler(("/usr/bin/ccache", "g++")).is_zig


def test_a_prebuilt_library_needs_no_compiler(native: NativeFake, library: Path, no_compiler: None) -> None:
    isa, _, source, _, content = library.stem.split("--")
    (native.sources / "ready").mkdir()
    (native.sources / "ready" / f"{isa}--clang-1.2--{source}--ready--{content}.so").write_bytes(library.read_bytes())
    assert native.ask() == 42
    assert build.native_description(native.sources) == f"{isa}, clang 1.2, source {source[:8]}"
    write_sources(native.sources, 43)  # the library was made of other sources
    assert "no C++ compiler" in native.failure()


@pytest.mark.parametrize(
    ("first", "version"),
    [
        ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0", "g++ 12.2.0"),
        ("g++ (GCC) 13.2.1 20231205 (Red Hat 13.2.1-6)", "g++ 13.2.1"),
        ("Debian clang version 14.0.6", "clang 14.0.6"),
        ("Apple clang version 15.0.0 (clang-1500.3.9.4)", "clang 15.0.0"),
        ("clang version 22.1.8", "clang 22.1.8"),
    ],
)
def test_the_description_has_the_compiler_s_version(native: NativeFake, first: str, version: str) -> None:
    native.compiler.behave(version=f"echo '{first}'; echo 'Target: none 7.7.7'")
    native.ask()
    assert build.native_description(native.sources).split(", ")[1] == version


# Instruction sets


@pytest.mark.parametrize(
    ("machine", "flags", "isa"),
    [
        ("x86_64", AMX, "amx"),
        ("x86_64", AMX - {"amx_bf16"}, "avx512_bf16"),
        ("x86_64", AVX512, "avx512"),
        ("x86_64", AVX512_BF16 - {"avx512vl"}, "avx2"),
        ("x86_64", AVX2, "avx2"),
        ("aarch64", frozenset(), "neon"),
        ("arm64", frozenset(), "neon"),
    ],
)
def test_the_best_instruction_set_of_a_cpu(machine: str, flags: frozenset[str], isa: str) -> None:
    assert build.isas_of(machine, flags)[0].name == isa


@pytest.mark.parametrize(
    ("machine", "flags", "reason"),
    [("x86_64", {"fpu", "sse2", "avx"}, "avx2"), ("x86_64", AVX2 - {"fma"}, "fma"), ("riscv64", set(), "riscv64")],
)
def test_a_cpu_without_native_code_compiles_nothing(
    native: NativeFake, monkeypatch: pytest.MonkeyPatch, machine: str, flags: set[str], reason: str
) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset(flags))
    assert reason in native.failure()
    assert native.compiler.calls == []


def test_machines_that_share_a_home_have_libraries_of_their_own(
    native: NativeFake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    for times, (name, flags) in enumerate([("avx512_bf16", AVX512_BF16), ("avx512", AVX512), ("avx2", AVX2)], start=1):
        monkeypatch.setattr(build, "cpu_flags", lambda flags=flags: flags)
        assert native.ask() == native.ask() == 42
        assert build.native_description(native.sources).startswith(f"{name}, ")
        assert native.compiler.compiled == len(native.libraries()) == times
    assert ["-mavx512bf16" in call for call in native.compiler.compilations] == [True, False, False]


def test_a_compiler_too_old_for_the_best_instruction_set(
    native: NativeFake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Then the next instruction set is compiled for. Any other failure would repeat with the next one."""
    best, older = build.Isa("best", frozenset(), ("-mbest",), ""), build.Isa("older", frozenset(), ("-mold",), "")
    monkeypatch.setattr(build, "ISAS", {platform.machine(): (best, older)})
    native.compiler.behave(
        """case " $* " in *" -mbest "*) echo "g++: error: unrecognized command-line option '-mbest'"; exit 1; esac"""
    )
    assert native.ask() == 42
    assert [path.name.partition("--")[0] for path in native.libraries()] == ["older"]
    assert any("does not know" in record.getMessage() for record in caplog.records)
    write_sources(native.sources, 43)
    native.compiler.behave("echo 'error: no space left'; exit 1")
    before = native.compiler.compiled
    assert "no space left" in native.failure()
    assert native.compiler.compiled == before + 1


# Compilers that fail


@pytest.mark.parametrize(
    ("before", "write", "reason"),
    [
        ("echo In file included; echo 'x.hpp:7: error: no such thing' >&2; exit 1", None, "x.hpp:7: error: no such"),
        ("exit 3", None, "failed: status 3"),
        ("", ":", "wrote no library"),
        ("", 'echo nothing > "$out"', "does not load"),
        ("", ': > "$out"', "does not load"),
    ],
)
def test_a_compiler_that_fails(native: NativeFake, before: str, write: str | None, reason: str) -> None:
    native.compiler.behave(before=before, write=write)
    assert reason in native.failure()
    assert write or native.libraries() == []
    native.compiler.path.write_bytes(b"\x7fELF nothing")
    assert "does not start" in native.failure()


def test_a_compiler_that_hangs_leaves_no_process(
    native: NativeFake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    native.compiler.behave(before=f"sleep 600 & echo $$ $! > {tmp_path}/pids; wait")
    monkeypatch.setattr(build, "TIMEOUT_S", 1.0)
    assert "was not done after 1 s" in native.failure()
    pids = (tmp_path / "pids").read_text().split()
    until(lambda: not any(map(is_running, pids)))
    assert [path.name for path in native.cache.iterdir()] == ["lock"]


def test_two_processes_at_once_compile_once(native: NativeFake) -> None:
    native.compiler.behave(before="sleep 1")
    both = [start_asking(native.sources) for _ in range(2)]
    assert [process.communicate()[0] for process in both] == ["42\n", "42\n"]
    assert native.compiler.compiled == len(native.libraries()) == 1


def test_a_file_system_without_locks(native: NativeFake, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(build.fcntl, "flock", flock)
    assert native.ask() == 42


def test_a_process_that_dies_while_it_compiles_holds_no_lock(native: NativeFake, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    native.compiler.behave(before=f"echo $$ >> {pid}; sleep 600")
    first = start_asking(native.sources)
    until(lambda: pid.exists() and bool(pid.read_text()))
    first.kill()
    first.communicate()
    native.compiler.behave()
    started = time.monotonic()
    assert native.ask() == 42
    assert time.monotonic() - started < 30  # its compiler still runs
    os.killpg(int(pid.read_text()), signal.SIGKILL)


# The cache folder


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("native") == tmp_path / "xdg" / "paceline" / "native"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder("native") == tmp_path / "home" / ".cache" / "paceline" / "native"


@pytest.mark.parametrize("fault", ["a file is in the way", "no new folder", "read-only", "no home"])
def test_a_library_that_cannot_be_kept(native: NativeFake, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "a file is in the way":
        monkeypatch.setenv("PACELINE_CACHE_DIR", str(native.compiler.path / "cache"))
    elif fault == "no new folder":
        monkeypatch.setenv("PACELINE_CACHE_DIR", "/proc/cache")
    elif fault == "read-only":  # root may write everywhere; the lock is the first file that is opened
        (cache_folder("native") / "lock").mkdir()
    else:
        for name in ("PACELINE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(os, "getuid", lambda: 987654)  # not in the system's list of users
    assert "set PACELINE_CACHE_DIR to a folder" in native.failure()
    assert native.libraries() == []
    assert native.compiler.compiled == 0


def test_a_library_in_a_read_only_cache_is_loaded(native: NativeFake) -> None:
    native.ask()
    (native.cache / "lock").unlink()
    (native.cache / "lock").mkdir()
    assert native.ask() == 42


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.chmod(0o720),
        lambda path: path.chmod(0o702),
        lambda path: path.chmod(0o1702),
        pytest.param(lambda path: os.chown(path, 12345, -1), marks=needs_root),
    ],
    ids=["group", "others", "sticky", "another owner"],
)
def test_a_library_that_others_may_write_to_is_compiled_again(
    native: NativeFake, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], None]
) -> None:
    native.ask()
    harm(native.libraries()[0])
    for _ in range(2):  # the second time it finds the new library
        assert native.ask() == 42
        assert native.compiler.compiled == 2
    assert any("others may write" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("mode", [0o770, 0o707, pytest.param("another owner", marks=needs_root)])
@pytest.mark.parametrize("above", [0, 1, 2])
def test_a_folder_that_others_may_write_to(native: NativeFake, mode: int | str, above: int) -> None:
    """A user who can write to a folder above can replace this one."""
    native.ask()
    folder = (native.cache, *native.cache.parents)[above]
    if isinstance(mode, str):
        os.chown(folder, 12345, -1)
    else:
        folder.chmod(mode)
    assert f"others may write to {folder}" in native.failure()
    if isinstance(mode, int):
        folder.chmod(mode | 0o1000)  # sticky, such as /tmp: there only the owner can rename a file
        assert native.ask() == 42


@pytest.mark.parametrize("harm", ["empty", "truncated", "changed"])
def test_a_broken_library_is_compiled_again(native: NativeFake, harm: str) -> None:
    """In another process: loading a truncated library may kill it."""
    native.ask()
    (path,) = native.libraries()
    content = path.read_bytes()
    broken = {"empty": b"", "truncated": content[: len(content) // 3], "changed": content.replace(b"answer", b"zzzzzz")}
    path.unlink()  # this process has it mapped
    path.write_bytes(broken[harm])
    assert start_asking(native.sources).communicate()[0] == "42\n"
    assert native.compiler.compiled == 2
    assert path.read_bytes() == content
