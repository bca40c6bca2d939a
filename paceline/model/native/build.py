"""Compile the native pass at its first use, keep the library in a cache folder, and load it.

`native_library()` tries in this order: a library in the wheel (`ready/` next to the sources), one in the cache folder,
a new one from the system's C++ compiler or from the `ziglang` wheel's. Every failure is a `NativeUnavailableError` with
one sentence; the caller then uses torch.

A library is compiled for an instruction set (`Isa`), not with `-march=native`: that also tunes for the CPU's model,
and GCC's tuning decides which multiplications and additions it fuses. So two machines with the same instruction set,
compiler and sources compute the same bits. A file's name has everything that its content depends on, and a hash of the
content, since loading a truncated library can kill the process:

    <instruction set>--<compiler>--<hash of sources and flags>--<hash of the compiler's file, or "ready">--<content>.so

The cache folder is `native` in $PACELINE_CACHE_DIR, $XDG_CACHE_HOME/paceline or ~/.cache/paceline. PACELINE_NATIVE=0
switches the native pass off; PACELINE_NATIVE_FLAGS are extra flags for the compiler, such as a sanitizer's.

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
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
MAIN_SOURCE = "native.cpp"
"""The one translation unit; it includes the headers."""
TIMEOUT_S = 300.0
FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-pthread"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),  # never -ffast-math: it reorders sums
    "-Wno-psabi",
)


class NativeUnavailableError(Exception):
    """There is no native pass on this machine; the message is one sentence with the reason."""


class Isa(NamedTuple):
    """An instruction set that the sources have code for."""

    name: str
    needs: frozenset[str]
    """CPU flags, as Linux names them."""
    flags: tuple[str, ...]
    """For GCC and clang."""
    zig: str
    """Zig's name: it refuses GCC's flags."""


_AVX2 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AVX512_VNNI = _AVX512 | {"avx512_vnni"}
_AVX512_BF16 = _AVX512_VNNI | {"avx512_bf16"}
_VNNI_FLAGS = ("-march=x86-64-v4", "-mavx512vnni")
_X86 = (  # the best first
    Isa(
        "amx",
        _AVX512_BF16 | {"amx_tile", "amx_bf16"},
        (*_VNNI_FLAGS, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        "x86_64_v4+avx512vnni+avx512bf16+amx_tile+amx_bf16",
    ),
    Isa("avx512_bf16", _AVX512_BF16, (*_VNNI_FLAGS, "-mavx512bf16"), "x86_64_v4+avx512vnni+avx512bf16"),
    Isa("avx512_vnni", _AVX512_VNNI, _VNNI_FLAGS, "x86_64_v4+avx512vnni"),
    Isa("avx512", _AVX512, ("-march=x86-64-v4",), "x86_64_v4"),
    Isa("avx2", _AVX2, ("-march=x86-64-v3",), "x86_64_v3"),
)
_ARM = (
    Isa("neon_dotprod", frozenset({"asimddp"}), ("-march=armv8.2-a+dotprod",), "generic+v8_2a+dotprod"),
    Isa("neon", frozenset(), ("-march=armv8-a",), "generic"),
)
ISAS = {"x86_64": _X86, "aarch64": _ARM, "arm64": _ARM}
"""By the machine's name."""


class Compiler(NamedTuple):
    command: tuple[str, ...]

    @property
    def is_zig(self) -> bool:
        return Path(self.command[0]).name == "zig" or "ziglang" in self.command

    @property
    def key(self) -> str:
        """Changes with the compiler's file. Running `--version` at every start would take too long."""
        files = (Path(part).resolve() for part in self.command if Path(part).is_file())
        seen = [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files]
        return _digest(repr((self.command, seen)).encode())

    def target(self, isa: Isa) -> tuple[str, ...]:
        return (f"-mcpu={isa.zig}",) if self.is_zig else isa.flags


class _Library(NamedTuple):
    library: ctypes.CDLL
    file_name: str


def native_library(sources: Path = SOURCES) -> ctypes.CDLL:
    """The native pass of these sources; compiles and loads it at most once per process.

    Raises `NativeUnavailableError`.
    """
    return _load_once(sources).library


def native_description(sources: Path = SOURCES) -> str:
    """What the library's numbers depend on, such as "avx512_bf16, g++ 12.2.0, source 1a2b3c4d".

    Raises `NativeUnavailableError`.
    """
    isa, compiler, source, *_ = _load_once(sources).file_name.split("--")
    return f"{isa}, {compiler.replace('-', ' ')}, source {source[:8]}"


def _load_once(sources: Path) -> _Library:
    if os.environ.get("PACELINE_NATIVE") == "0":
        raise NativeUnavailableError("PACELINE_NATIVE=0 switches the native pass off")
    library = _library_or_reason(sources)
    if isinstance(library, str):
        raise NativeUnavailableError(library)
    return library


@cache
def _library_or_reason(sources: Path) -> _Library | str:
    """The library, or why there is none: a compiler that failed does not run again for the next model."""
    try:
        isas = _isas()
        # The owner of the wheel's library is not checked: a user who can replace it can replace this file, too.
        pattern = f"{isas[0].name}--*--{source_hash(sources)}--ready--*.so"
        return _find(sources / "ready", pattern) or _find_or_compile(sources, isas)
    except NativeUnavailableError as error:
        return str(error)


def isas_of(machine: str, flags: frozenset[str]) -> list[Isa]:
    """The instruction sets of a CPU with these flags, best first. Raises `NativeUnavailableError` if it has none."""
    if machine not in ISAS:
        raise NativeUnavailableError(f"there is no native code for {machine}")
    if found := [isa for isa in ISAS[machine] if isa.needs <= flags]:
        return found
    missing = ", ".join(sorted(ISAS[machine][-1].needs - flags))
    raise NativeUnavailableError(f"the CPU lacks what native code needs: {missing}")


def cpu_flags() -> frozenset[str]:
    """As Linux names them; empty on other systems."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return frozenset()
    return frozenset(flags.partition(":")[2].split())


def source_hash(sources: Path) -> str:
    """A hash of all sources and compiler flags."""
    files = sorted([*sources.glob("*.cpp"), *sources.glob("*.hpp")])
    more = shlex.split(os.environ.get("PACELINE_NATIVE_FLAGS", ""))
    return _digest(repr((FLAGS, more, [(file.name, file.read_bytes()) for file in files])).encode())


def find_compiler() -> Compiler | None:
    """$CXX, the system's compiler, or the one in the `ziglang` wheel; None if there is none."""
    for command in (shlex.split(os.environ.get("CXX", "")), ["c++"], ["g++"], ["clang++"]):
        path = shutil.which(command[0]) if command else None
        if path:
            return Compiler((str(Path(path).absolute()), *command[1:]))
    wheel = importlib.util.find_spec("ziglang")
    if wheel is None or wheel.origin is None:
        return None
    return Compiler((str(Path(wheel.origin).with_name("zig")), "c++"))


def _find_or_compile(sources: Path, isas: Sequence[Isa]) -> _Library:
    """A library for the best instruction set that the compiler knows."""
    compiler = find_compiler()
    if compiler is None:
        raise NativeUnavailableError("there is no C++ compiler: install g++ or clang, or paceline[native]")
    *better, last = isas
    for isa in better:
        try:
            return _find_or_compile_for(isa, sources, compiler)
        except NativeUnavailableError as error:
            if not any(flag in str(error) for flag in isa.flags):
                raise
            log.warning("the compiler does not know an instruction set", extra={"isa": isa.name, "reason": str(error)})
    return _find_or_compile_for(last, sources, compiler)


def _find_or_compile_for(isa: Isa, sources: Path, compiler: Compiler) -> _Library:
    from paceline.cache_folder import cache_folder  # not at the top: a wheel is built where paceline is not installed

    pattern = f"{isa.name}--*--{source_hash(sources)}--{compiler.key}--*.so"
    try:
        folder = cache_folder("native")
        if found := _find(folder, pattern, check_owner=True):
            return found
        with (folder / "lock").open("w") as lock:  # until it is closed, one process compiles
            with suppress(OSError):  # on a file system without locks several processes compile, which is only slower
                fcntl.flock(lock, fcntl.LOCK_EX)
            if found := _find(folder, pattern, check_owner=True):
                return found
            log.info(
                "compiling the native pass", extra={"compiler": shlex.join(compiler.command), "folder": str(folder)}
            )
            return _load(compile_library(sources, isa, compiler, folder, compiler.key))
    except (OSError, RuntimeError) as error:
        raise NativeUnavailableError(
            f"the compiled library cannot be kept: {error}; set PACELINE_CACHE_DIR to a folder that only you can write"
        ) from None


def compile_library(
    sources: Path, isa: Isa, compiler: Compiler, folder: Path, key: str, *, link_flags: Sequence[str] = ()
) -> Path:
    """Compile into a folder. The file appears complete or not at all; `key` is a part of its name.

    Compiling and linking are two commands: Zig builds a C++ library when it links, which takes a minute, and can then
    reuse it for another instruction set.

    Raises `NativeUnavailableError` where the compiler fails, and `OSError` where the folder cannot be written.
    """
    version = _version(compiler, folder)
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder, ignore_cleanup_errors=True) as name:
        building = Path(name)
        object_file, linked = building / "native.o", building / "native.so"
        more = shlex.split(os.environ.get("PACELINE_NATIVE_FLAGS", ""))
        source = (sources / MAIN_SOURCE).absolute()
        to_object = ("-c", *FLAGS, *compiler.target(isa), *more, str(source), "-o", str(object_file))
        to_library = ("-shared", "-pthread", *more, *link_flags, str(object_file), "-o", str(linked))
        for arguments in (to_object, to_library):
            _run((*compiler.command, *arguments), folder, building)
        if not linked.is_file():
            raise NativeUnavailableError(f"{compiler.command[0]} wrote no library")
        parts = [isa.name, version, source_hash(sources), key, _digest(linked.read_bytes())]
        linked.chmod(0o700)
        return linked.replace(folder / f"{'--'.join(parts)}.so")


def _find(folder: Path, pattern: str, *, check_owner: bool = False) -> _Library | None:
    """The first file that matches the pattern, is complete and loads; with `check_owner`, that no other user can
    write."""
    from paceline.cache_folder import is_safe

    for path in sorted(folder.glob(pattern)):
        if check_owner and not is_safe(path):
            log.warning("not loading a library that others may write to", extra={"path": str(path)})
        elif _digest(path.read_bytes()) == path.stem.rpartition("--")[2]:
            with suppress(NativeUnavailableError):  # compiled with another system's C library, perhaps
                return _load(path)
    return None


def _load(path: Path) -> _Library:
    try:
        return _Library(ctypes.CDLL(str(path)), path.name)
    except OSError as error:
        raise NativeUnavailableError(f"the library does not load: {error}") from None


def _run(command: Sequence[str], folder: Path, temporary: Path) -> str:
    """Run a compiler and return its output. On return no process of it is left. Raises `NativeUnavailableError`."""
    env = {**os.environ, "LC_ALL": "C", "TMPDIR": str(temporary)}
    env.pop("LD_PRELOAD", None)  # a sanitizer is for the library, not for its compiler
    env |= {"ZIG_GLOBAL_CACHE_DIR": str(folder / "zig"), "ZIG_LOCAL_CACHE_DIR": str(folder / "zig")}
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
    except OSError as error:
        raise NativeUnavailableError(f"{command[0]} does not start: {error.strerror}") from None
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise NativeUnavailableError(f"{command[0]} was not done after {TIMEOUT_S:.0f} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    text = output.decode(errors="replace")
    if process.returncode != 0:
        raise NativeUnavailableError(
            f"{command[0]} failed: {_first_error_line(text) or f'status {process.returncode}'}"
        )
    return text


def _first_error_line(text: str) -> str:
    """The first line with an error, else the first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "")


def _version(compiler: Compiler, folder: Path) -> str:
    """Such as g++-12.2.0."""
    first = _run((*compiler.command, "--version"), folder, folder).partition("\n")[0]
    number = re.search(r"(?:version|\)) (\d+(?:\.\d+)+)", first)
    return f"{'clang' if 'clang' in first else 'g++'}-{number[1] if number else _digest(first.encode())}"


def _isas() -> list[Isa]:
    flags = cpu_flags()
    if "amx_tile" in flags and not _may_use_tiles():
        flags -= {"amx_tile", "amx_bf16"}
    return isas_of(platform.machine(), flags)


@cache
def _may_use_tiles() -> bool:
    """Ask Linux for permission to use the tile registers of AMX in this process."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    with suppress(AttributeError, OSError):
        return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)
    return False


def _digest(data: bytes) -> str:
    """64 bits in hexadecimal."""
    return hashlib.sha256(data).hexdigest()[:16]
