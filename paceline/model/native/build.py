"""Compile the native pass at its first use, keep the library, and load it.

`native_library()` takes, in this order: a library that the wheel carries (`ready/` beside the sources), one from the
cache folder, or a new one from the system's C++ compiler or the `ziglang` wheel's. Every failure is a
`NativeUnavailableError` with one sentence; its caller goes on without the native pass.

A library is compiled for an instruction set (`Isa`), not with `-march=native`: that also tunes for the CPU's model,
and GCC's tuning decides which multiplications and additions it fuses. So two machines with the same instruction set,
compiler and sources compute the same bits. A file's name says all that its content depends on, and a hash of its
content, since loading a truncated library can kill the process:

    <instruction set>--<compiler>--<hash of sources and flags>--<hash of the compiler's file, or "ready">--<content>.so

The cache folder is `native` in $PACELINE_CACHE_DIR, $XDG_CACHE_HOME/paceline or ~/.cache/paceline. PACELINE_NATIVE=0
switches the native pass off; PACELINE_NATIVE_FLAGS are more flags for the compiler (a sanitizer's).

The wheel's build hook loads this file alone, so it imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import re
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
MAIN_SOURCE = "native.cpp"
"""The one translation unit; it includes the headers beside it."""
TIMEOUT_S = 300.0
FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-pthread"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),  # never -ffast-math: it reorders sums
    "-Wno-psabi",
)


class NativeUnavailableError(Exception):
    """The native pass cannot be had here; the message is one sentence that says why."""


class Isa(NamedTuple):
    """An instruction set that the sources have code for."""

    name: str
    needs: frozenset[str]
    """Flags of the CPU, as Linux names them."""
    flags: tuple[str, ...]
    """What makes GCC and clang use it."""
    zig: str
    """What Zig calls it, which refuses GCC's names."""


_AVX2 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AVX512_BF16 = _AVX512 | {"avx512_bf16"}
_X86 = (  # the best first
    Isa(
        "amx",
        _AVX512_BF16 | {"amx_tile", "amx_bf16"},
        ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        "x86_64_v4+avx512bf16+amx_tile+amx_bf16",
    ),
    Isa("avx512_bf16", _AVX512_BF16, ("-march=x86-64-v4", "-mavx512bf16"), "x86_64_v4+avx512bf16"),
    Isa("avx512", _AVX512, ("-march=x86-64-v4",), "x86_64_v4"),
    Isa("avx2", _AVX2, ("-march=x86-64-v3",), "x86_64_v3"),
)
_ARM = (Isa("neon", frozenset(), ("-march=armv8-a",), "generic"),)
ISAS = {"x86_64": _X86, "aarch64": _ARM, "arm64": _ARM}
"""By the machine's name."""


class Compiler(NamedTuple):
    command: tuple[str, ...]

    @property
    def is_zig(self) -> bool:
        return Path(self.command[0]).name == "zig" or "ziglang" in self.command

    @property
    def key(self) -> str:
        """Changes when the compiler's file does; asking a compiler for its version takes longer than a start may."""
        files = (Path(word).resolve() for word in self.command if Path(word).is_file())
        seen = [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files]
        return _digest(repr((self.command, seen)).encode())

    def target(self, isa: Isa) -> tuple[str, ...]:
        return (f"-mcpu={isa.zig}",) if self.is_zig else isa.flags


class _Loaded(NamedTuple):
    library: ctypes.CDLL
    name: str
    """Its file's."""


def native_library(sources: Path = SOURCES) -> ctypes.CDLL:
    """The native pass of these sources, compiled if it has to be; at most once per process.

    Raises `NativeUnavailableError`.
    """
    return _loaded(sources).library


def native_description(sources: Path = SOURCES) -> str:
    """What the library's numbers depend on, such as "avx512_bf16, g++ 12.2.0, source 1a2b3c4d".

    Raises `NativeUnavailableError`.
    """
    isa, compiler, source, *_ = _loaded(sources).name.split("--")
    return f"{isa}, {compiler.replace('-', ' ')}, source {source[:8]}"


def _loaded(sources: Path) -> _Loaded:
    if os.environ.get("PACELINE_NATIVE") == "0":
        raise NativeUnavailableError("PACELINE_NATIVE=0 switches the native pass off")
    found = _load_or_reason(sources)
    if isinstance(found, str):
        raise NativeUnavailableError(found)
    return found


@cache
def _load_or_reason(sources: Path) -> _Loaded | str:
    """The library, or why there is none: a compiler that failed is not run again for the next model."""
    try:
        return _find_prebuilt(sources) or _compiled(sources)
    except NativeUnavailableError as error:
        return str(error)


def isas_of(machine: str, flags: frozenset[str]) -> list[Isa]:
    """The instruction sets of a CPU with these flags, the best first. Raises `NativeUnavailableError`."""
    if machine not in ISAS:
        raise NativeUnavailableError(f"there is no native code for {machine}")
    if found := [isa for isa in ISAS[machine] if isa.needs <= flags]:
        return found
    missing = ", ".join(sorted(ISAS[machine][-1].needs - flags))
    raise NativeUnavailableError(f"the CPU lacks what native code needs: {missing}")


def cpu_flags() -> frozenset[str]:
    """Empty where the system does not tell."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            flags = next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        return frozenset()
    return frozenset(flags.partition(":")[2].split())


def source_hash(sources: Path) -> str:
    """Of all sources and the flags that they are compiled with."""
    files = sorted([*sources.glob("*.cpp"), *sources.glob("*.hpp")])
    return _digest(repr((FLAGS, _more_flags(), [(file.name, file.read_bytes()) for file in files])).encode())


def find_compiler() -> Compiler | None:
    """$CXX, the system's, or the one in the `ziglang` wheel."""
    for words in (shlex.split(os.environ.get("CXX", "")), ["c++"], ["g++"], ["clang++"]):
        found = shutil.which(words[0]) if words else None
        if found:
            return Compiler((str(Path(found).absolute()), *words[1:]))
    wheel = importlib.util.find_spec("ziglang")
    if wheel is None or wheel.origin is None:
        return None
    return Compiler((str(Path(wheel.origin).with_name("zig")), "c++"))


def _find_prebuilt(sources: Path) -> _Loaded | None:
    """The library inside the wheel. Its owner is not checked: whoever can replace it can replace this file too."""
    return _find_cached(sources / "ready", f"{_isas()[0].name}--*--{source_hash(sources)}--ready--*.so")


def _compiled(sources: Path) -> _Loaded:
    """From the cache folder or the compiler."""
    compiler = find_compiler()
    if compiler is None:
        raise NativeUnavailableError("there is no C++ compiler: install g++ or clang, or paceline[native]")
    *better, last = _isas()
    for isa in better:
        try:
            return _compiled_for(isa, sources, compiler)
        except NativeUnavailableError as error:
            if not any(flag in str(error) for flag in isa.flags):
                raise
            log.warning("the compiler does not know an instruction set", extra={"isa": isa.name, "reason": str(error)})
    return _compiled_for(last, sources, compiler)


def _compiled_for(isa: Isa, sources: Path, compiler: Compiler) -> _Loaded:
    try:
        return _cached(isa, sources, compiler, cache_folder())
    except (OSError, RuntimeError) as error:
        return _uncached(isa, sources, compiler, error)


def _cached(isa: Isa, sources: Path, compiler: Compiler, folder: Path) -> _Loaded:
    """Raises `OSError` if the folder cannot be written."""
    pattern = f"{isa.name}--*--{source_hash(sources)}--{compiler.key}--*.so"
    found = _find_cached(folder, pattern, only_ours=True)
    if found:
        return found
    with _locked(folder):
        found = _find_cached(folder, pattern, only_ours=True)  # another process may have compiled it meanwhile
        if found:
            return found
        log.info("compiling the native pass", extra={"compiler": shlex.join(compiler.command), "folder": str(folder)})
        return _load(compile_library(sources, isa, compiler, folder, compiler.key))


def _uncached(isa: Isa, sources: Path, compiler: Compiler, why: Exception) -> _Loaded:
    """Compiled for this process alone: a loaded library needs its file no more."""
    log.warning(
        "compiling the native pass for this process alone",
        extra={"compiler": shlex.join(compiler.command), "reason": str(why)},
    )
    try:
        with tempfile.TemporaryDirectory(prefix="paceline-native-", ignore_cleanup_errors=True) as folder:
            return _load(compile_library(sources, isa, compiler, Path(folder), compiler.key))
    except OSError as error:
        raise NativeUnavailableError(f"there is no place to compile in: {error}") from None


def compile_library(
    sources: Path, isa: Isa, compiler: Compiler, folder: Path, key: str, *, link_flags: Sequence[str] = ()
) -> Path:
    """Compile into a folder; the file appears whole or not at all, under the name that `key` is a part of.

    Compiling and linking are two commands: Zig makes a C++ library of its own when it links, a minute's work, and can
    so use it again for another instruction set.

    Raises `NativeUnavailableError` where the compiler fails, and `OSError` where the folder cannot be written.
    """
    version = _version(compiler)
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder, ignore_cleanup_errors=True) as building:
        object_, linked = Path(building, "native.o"), Path(building, "native.so")
        target = compiler.target(isa)
        more = _more_flags()
        to_object = ("-c", *FLAGS, *target, *more, str((sources / MAIN_SOURCE).absolute()), "-o", str(object_))
        to_library = ("-shared", "-pthread", *more, *link_flags, str(object_), "-o", str(linked))
        for arguments in (to_object, to_library):
            _run((*compiler.command, *arguments), Path(building), folder)
        if not linked.is_file():
            raise NativeUnavailableError(f"{compiler.command[0]} wrote no library")
        name = "--".join([isa.name, version, source_hash(sources), key, _digest(linked.read_bytes())])
        linked.chmod(0o700)
        return linked.replace(folder / f"{name}.so")


def cache_folder() -> Path:
    """The folder for libraries, made if need be.

    Raises `OSError` if it cannot be made or is not the user's alone, `RuntimeError` if the user has no home.
    """
    given, xdg = os.environ.get("PACELINE_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    base = Path(given) if given else Path(xdg or Path.home() / ".cache") / "paceline"
    folder = (base / "native").resolve()
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)
    for each in (folder, *folder.parents):
        if not _is_safe(each):
            raise PermissionError(f"others may write to {each}")
    return folder


def _is_safe(path: Path) -> bool:
    """Whether nobody but this user and root can put anything in place of this file, or of what this folder has."""
    found = path.lstat()
    writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    return found.st_uid in (os.geteuid(), 0) and (not writable or bool(sticky))


def _find_cached(folder: Path, pattern: str, *, only_ours: bool = False) -> _Loaded | None:
    """A library of this name that is whole, and with `only_ours` one that others cannot have written."""
    for path in sorted(folder.glob(pattern)):
        if only_ours and not _is_safe(path):
            log.warning("not loading a library that others may write to", extra={"path": str(path)})
        elif _digest(path.read_bytes()) == path.stem.rpartition("--")[2]:
            with suppress(NativeUnavailableError):  # made with another system's C library, say: compile it again
                return _load(path)
    return None


def _load(path: Path) -> _Loaded:
    try:
        return _Loaded(ctypes.CDLL(str(path)), path.name)
    except OSError as error:
        raise NativeUnavailableError(f"the library does not load: {error}") from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process compile at a time. Without the lock, or after a long wait, two do: that is only wasteful.

    The kernel gives the lock back when its holder dies.
    """
    with (folder / "lock").open("w") as file:
        waiting_until = time.monotonic() + TIMEOUT_S
        while time.monotonic() < waiting_until:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
            else:
                break
        yield


def _run(command: Sequence[str], building: Path, folder: Path) -> str:
    """What a compiler says; it and all that it starts are gone afterwards. Raises `NativeUnavailableError`."""
    said = building / "said"
    env = {**os.environ, "LC_ALL": "C", "TMPDIR": str(building)}
    env.pop("LD_PRELOAD", None)  # a sanitizer is for the library, not for its compiler
    env |= {"ZIG_GLOBAL_CACHE_DIR": str(folder / "zig"), "ZIG_LOCAL_CACHE_DIR": str(folder / "zig")}
    with said.open("wb") as to:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=to, stderr=to, cwd=building, env=env, start_new_session=True
            )
        except OSError as error:
            raise NativeUnavailableError(f"{command[0]} does not start: {error.strerror}") from None
    try:
        status = process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise NativeUnavailableError(f"{command[0]} was not done after {TIMEOUT_S:.0f} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = said.read_text(encoding="utf-8", errors="replace")
    if status != 0:
        raise NativeUnavailableError(f"{command[0]} failed: {_first_error_line(text) or f'status {status}'}")
    return text


def _first_error_line(text: str) -> str:
    """Its first line with an error, or else its first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "")


def _version(compiler: Compiler) -> str:
    """Such as g++-12.2.0."""
    with tempfile.TemporaryDirectory(prefix="paceline-native-", ignore_cleanup_errors=True) as folder:
        first = _run((*compiler.command, "--version"), Path(folder), Path(folder)).partition("\n")[0]
    found = re.search(r"(?:version|\)) (\d+(?:\.\d+)+)", first)
    return f"{'clang' if 'clang' in first else 'g++'}-{found[1] if found else _digest(first.encode())}"


def _isas() -> list[Isa]:
    flags = cpu_flags()
    if "amx_tile" in flags and not _may_use_tiles():
        flags -= {"amx_tile", "amx_bf16"}
    return isas_of(platform.machine(), flags)


@cache
def _may_use_tiles() -> bool:
    """Ask Linux for the tile registers of AMX, which a process may use from then on."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    with suppress(AttributeError, OSError):
        return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)
    return False


def _more_flags() -> list[str]:
    return shlex.split(os.environ.get("PACELINE_NATIVE_FLAGS", ""))


def _digest(data: bytes) -> str:
    """64 bits in hexadecimal."""
    return hashlib.sha256(data).hexdigest()[:16]
