"""How the native pass is compiled, kept and loaded, with a small library in its place, and what goes wrong then."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.model.native import build
from paceline.model.native.build import Compiler, NativeUnavailableError
from tests.helpers.compilers import ASK, Fake, real_compiler, write_sources

V4 = build._AVX512


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that a real compiler made."""
    compiler = real_compiler()
    sources = write_sources(tmp_path_factory.mktemp("sources"))
    return build.compile_library(sources, build._isas()[0], compiler, tmp_path_factory.mktemp("compiled"), "test")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return write_sources(tmp_path / "sources")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for libraries, made by who needs it first."""
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("PACELINE_NATIVE", "PACELINE_NATIVE_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path / "cache" / "native"
    build._load_or_reason.cache_clear()


@pytest.fixture
def fake(tmp_path: Path, answer: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake(tmp_path / "fake-c++", answer)
    monkeypatch.setenv("CXX", str(made.path))
    return made


def ask(sources: Path) -> int:
    """What a process says that has not loaded anything yet."""
    build._load_or_reason.cache_clear()
    return int(build.native_library(sources).answer())


def asking(sources: Path) -> subprocess.Popen[str]:
    """The same in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", ASK, str(sources), build.__file__], stdout=subprocess.PIPE, text=True
    )


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def libraries(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.so"))


def why_not(sources: Path) -> str:
    build._load_or_reason.cache_clear()
    with pytest.raises(NativeUnavailableError) as caught:
        build.native_library(sources)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_real_compiler_compiles_once(
    sources: Path, cache: Path, answer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert ask(sources) == 42
    assert [record.getMessage() for record in caplog.records] == ["compiling the native pass"]
    caplog.clear()
    assert ask(sources) == 42
    assert not caplog.records
    (library,) = libraries(cache)
    assert cache.stat().st_mode & 0o777 == cache.parent.stat().st_mode & 0o777 == 0o700
    assert library.stat().st_mode & 0o022 == 0
    isa, compiler, source = build.native_description(sources).split(", ")
    assert isa == build._isas()[0].name
    assert compiler.partition(" ")[0] in ("g++", "clang")
    assert source == f"source {build.source_hash(sources)[:8]}"


def test_other_sources_make_another_library(sources: Path, answer: Path) -> None:
    assert ask(sources) == 42
    write_sources(sources, 43)
    assert ask(sources) == 43


def test_a_library_is_ours_alone_whatever_others_files_are(sources: Path, answer: Path, cache: Path) -> None:
    before = os.umask(0)
    try:
        ask(sources)
    finally:
        os.umask(before)
    assert [each.stat().st_mode & 0o777 for each in (*libraries(cache), cache)] == [0o700, 0o700]


def test_once_per_process(sources: Path, fake: Fake) -> None:
    assert build.native_library(sources) is build.native_library(sources)
    fake.behave(before="exit 1")
    other = write_sources(sources.parent / "other", 44)
    for _ in range(2):
        with pytest.raises(NativeUnavailableError):
            build.native_library(other)
    assert fake.compiled == 2


def test_a_kept_library_asks_no_compiler(sources: Path, fake: Fake) -> None:
    assert ask(sources) == 42
    asked = fake.asked
    assert ask(sources) == 42
    assert fake.asked == asked


def test_flags_and_compilers_make_another_library(
    sources: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    ask(sources)
    assert build.native_description(sources).endswith(f", g++ 1.2.3, source {build.source_hash(sources)[:8]}")
    monkeypatch.setenv("PACELINE_NATIVE_FLAGS", "-O1 '-DNAME=two words'")
    ask(sources)
    assert fake.compiled == 2
    assert all(" -O1 -DNAME=two words " in line for line in fake.asked[-2:])  # compiled so, and linked
    os.utime(fake.path, ns=(1, 1))  # a new version in its place
    ask(sources)
    assert fake.compiled == 3
    assert len(libraries(cache)) == 3


def test_switched_off(sources: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(sources) == 42
    monkeypatch.setenv("PACELINE_NATIVE", "0")
    assert "PACELINE_NATIVE" in why_not(sources)


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "g++")
    monkeypatch.setitem(sys.modules, "ziglang", None)


@pytest.mark.usefixtures("no_compiler")
def test_no_compiler(sources: Path) -> None:
    assert "no C++ compiler" in why_not(sources)


@pytest.mark.usefixtures("no_compiler")
def test_the_wheels_compiler_where_there_is_no_other(
    sources: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang" / "__init__.py").touch()
    fake.path.rename(tmp_path / "ziglang" / "zig")
    monkeypatch.delenv("CXX")
    monkeypatch.delitem(sys.modules, "ziglang")
    monkeypatch.syspath_prepend(tmp_path)
    assert ask(sources) == 42
    assert {line.split()[0] for line in fake.asked} == {"c++"}
    assert any(f"-mcpu={build._isas()[0].zig}" in line for line in fake.asked)


def test_a_ready_library_needs_no_compiler(sources: Path, answer: Path, no_compiler: None) -> None:
    (sources / "ready").mkdir()
    parts = [
        build._isas()[0].name,
        "clang-1.2",
        build.source_hash(sources),
        "ready",
        build._digest(answer.read_bytes()),
    ]
    ready = sources / "ready" / f"{'--'.join(parts)}.so"
    ready.write_bytes(answer.read_bytes())
    assert ask(sources) == 42
    assert build.native_description(sources) == f"{parts[0]}, clang 1.2, source {parts[2][:8]}"
    write_sources(sources, 43)  # no longer what the library was made of
    assert "no C++ compiler" in why_not(sources)


@pytest.mark.parametrize("place", ["a file is in the way", "the system allows no folder here"])
def test_a_cache_folder_that_cannot_be_made(
    sources: Path,
    fake: Fake,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    folder = {"a file is in the way": tmp_path / "file" / "cache"}.get(place, Path("/proc/cache"))
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(folder))
    compiles_for_itself(sources, caplog, monkeypatch, tmp_path)


def test_a_cache_folder_that_cannot_be_written(
    sources: Path,
    fake: Fake,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    cache: Path,
) -> None:
    """Root may write everywhere, so the lock, the first file there, says what a read-only file system would."""
    build.cache_folder()
    (cache / "lock").mkdir()
    compiles_for_itself(sources, caplog, monkeypatch, tmp_path)
    assert libraries(cache) == []


def test_no_home(
    sources: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.delenv("PACELINE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 987654)  # nobody in the system's list of users
    compiles_for_itself(sources, caplog, monkeypatch, tmp_path)


def compiles_for_itself(
    sources: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a folder that is gone afterwards, with one line that says so."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(build.tempfile, "tempdir", str(temporary))
    caplog.set_level(logging.INFO)
    assert ask(sources) == 42
    assert [record.getMessage() for record in caplog.records] == ["compiling the native pass for this process alone"]
    assert list(temporary.iterdir()) == []


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.cache_folder() == tmp_path / "xdg" / "paceline" / "native"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert build.cache_folder() == tmp_path / "home" / ".cache" / "paceline" / "native"


def test_a_compiler_that_fails(sources: Path, fake: Fake, cache: Path) -> None:
    fake.behave(before="echo In file included; echo 'x.hpp:7: error: no such thing' >&2; echo more; exit 1")
    assert why_not(sources).endswith("fake-c++ failed: x.hpp:7: error: no such thing")
    fake.behave(before="exit 3")
    assert why_not(sources).endswith("failed: status 3")
    assert libraries(cache) == []


def test_a_compiler_that_does_not_start(sources: Path, fake: Fake) -> None:
    fake.path.write_bytes(b"\x7fELF nothing")
    assert "does not start" in why_not(sources)


@pytest.mark.parametrize("write", [":", 'echo nothing > "$out"', ': > "$out"'])
def test_a_compiler_that_writes_no_library(sources: Path, fake: Fake, write: str) -> None:
    fake.behave(write=write)
    why = why_not(sources)
    assert "wrote no library" in why or "does not load" in why


def test_a_compiler_that_hangs(
    sources: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    fake.behave(before=f"sleep 600 & echo $$ $! > {tmp_path}/pids; wait")
    monkeypatch.setattr(build, "TIMEOUT_S", 2.0)
    assert "was not done after 2 s" in why_not(sources)
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        until(lambda pid=pid: not is_running(pid))  # type: ignore[misc]
    assert [path.name for path in cache.iterdir()] == ["lock"]


X86_OF_2011 = frozenset({"fpu", "sse2", "ssse3", "avx"})


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
def test_the_best_that_a_cpu_can(machine: str, flags: frozenset[str], isa: str) -> None:
    assert build.isas_of(machine, flags)[0].name == isa


def test_a_compiler_that_is_too_old_for_the_best(
    sources: Path, fake: Fake, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next instruction set is compiled for. What else is wrong with a compiler is so with the next one, too."""
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
    assert "no space left" in why_not(sources)
    assert fake.compiled == before + 1


@pytest.mark.parametrize(
    ("machine", "flags", "why"),
    [("x86_64", X86_OF_2011, "avx2"), ("x86_64", build._AVX2 - {"fma"}, "fma"), ("riscv64", frozenset(), "riscv64")],
)
def test_a_cpu_that_cannot(machine: str, flags: frozenset[str], why: str) -> None:
    with pytest.raises(NativeUnavailableError, match=why):
        build.isas_of(machine, flags)


def test_a_cpu_without_avx2_compiles_nothing(sources: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "cpu_flags", lambda: X86_OF_2011)
    assert "avx2" in why_not(sources)
    assert fake.asked == []


def test_this_cpus_flags() -> None:
    """In the kernel's words, which differ from the compilers' (abm, avx512_bf16)."""
    if build.platform.machine() == "x86_64":
        assert {"fpu", "sse2"} <= build.cpu_flags()


def test_a_library_from_another_machine(
    sources: Path, fake: Fake, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One home on several machines: each finds its own."""
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    for times, flags in enumerate([V4 | {"avx512_bf16"}, V4, build._AVX2], start=1):
        monkeypatch.setattr(build, "cpu_flags", lambda flags=flags: flags)
        assert ask(sources) == ask(sources) == 42
        assert build.native_description(sources).startswith(f"{build._isas()[0].name}, ")
        assert fake.compiled == times
    assert [path.name.split("--")[0] for path in libraries(cache)] == ["avx2", "avx512", "avx512_bf16"]
    assert ["-mavx512bf16" in line for line in fake.compiling] == [True, False, False]


def test_two_processes_at_once(sources: Path, fake: Fake, cache: Path) -> None:
    fake.behave(before="sleep 1")
    both = [asking(sources) for _ in range(2)]
    assert [process.communicate()[0] for process in both] == ["42\n", "42\n"]
    assert fake.compiled == 1
    assert len(libraries(cache)) == 1


def test_two_processes_at_once_where_nothing_can_be_locked(
    sources: Path, answer: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both compile, and each loads a whole library: with the real compiler."""

    def no_locks(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(build.fcntl, "flock", no_locks)
    assert ask(sources) == 42
    (library,) = libraries(cache)
    library.unlink()
    both = [asking(sources) for _ in range(2)]
    assert [process.communicate()[0] for process in both] == ["42\n", "42\n"]


def test_a_process_that_dies_while_it_compiles(sources: Path, fake: Fake, tmp_path: Path, cache: Path) -> None:
    fake.behave(before=f"echo $$ >> {tmp_path}/pid; sleep 600")
    first = asking(sources)
    until(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()))
    first.kill()
    first.communicate()
    fake.behave()
    started = time.monotonic()
    assert ask(sources) == 42
    assert time.monotonic() - started < 30  # its compiler still runs, and holds no lock
    os.killpg(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_a_library_that_others_may_write_to(
    sources: Path, fake: Fake, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ask(sources)
    (library,) = libraries(cache)
    for mode in (0o720, 0o702, 0o1702):
        library.chmod(mode)
        before = fake.compiled
        assert ask(sources) == 42
        assert fake.compiled == before + 1
        assert any("others may write" in record.getMessage() for record in caplog.records)
        caplog.clear()
        assert ask(sources) == 42  # the new one in its place is ours alone
        assert fake.compiled == before + 1


@pytest.mark.parametrize("mode", [0o770, 0o707])
@pytest.mark.parametrize("above", [0, 1, 2])
def test_a_folder_that_others_may_write_to(
    sources: Path, fake: Fake, cache: Path, mode: int, above: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may write to a folder above can put another folder in this one's place."""
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(cache.parent / "deeper"))
    ask(sources)
    folder = (cache.parent / "deeper" / "native", cache.parent / "deeper", cache.parent)[above]
    folder.chmod(mode)
    with pytest.raises(PermissionError, match=f"others may write to {folder}"):
        build.cache_folder()
    ask(sources)
    assert fake.compiled == 2
    folder.chmod(mode | 0o1000)  # where all may write, but nobody may rename what is another's, such as /tmp
    assert build.cache_folder().is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_somebody_else_owns(sources: Path, fake: Fake, cache: Path) -> None:
    ask(sources)
    (library,) = libraries(cache)
    os.chown(library, 12345, -1)
    ask(sources)
    assert fake.compiled == 2
    for folder in (cache, cache.parent):
        os.chown(folder, 12345, -1)
        before = fake.compiled
        ask(sources)
        assert fake.compiled == before + 1
        os.chown(folder, 0, -1)


@pytest.mark.parametrize("harm", ["empty", "truncated", "changed"])
def test_a_broken_library_is_compiled_again(sources: Path, fake: Fake, cache: Path, harm: str) -> None:
    """In a process of its own: loading a truncated library may end it."""
    ask(sources)
    (library,) = libraries(cache)
    content = library.read_bytes()
    library.unlink()  # this process has it mapped
    library.write_bytes(
        {
            "empty": b"",
            "truncated": content[: len(content) // 3],
            "changed": content.replace(b"answer", b"zzzzzz"),
        }[harm]
    )
    assert asking(sources).communicate()[0] == "42\n"
    assert fake.compiled == 2
    assert library.read_bytes() == content


def test_a_compiler_with_words() -> None:
    """As in CXX='ccache g++'."""
    assert Compiler(tuple(shlex.split("/usr/bin/python -m ziglang c++"))).is_zig
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
def test_versions(fake: Fake, first: str, version: str) -> None:
    fake.path.write_text(f"#!/bin/sh\necho '{first}'; echo 'Target: none 7.7.7'\n")
    assert build._version(Compiler((str(fake.path),))) == version
