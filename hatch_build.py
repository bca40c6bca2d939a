"""Build hook: compiles the native pass into the wheel, if the build machine has a C++ compiler.

The wheel has one library for each instruction set of the machine's architecture; the CPU decides which one is loaded.
Without a compiler, or if it fails, the wheel is platform-independent and has only the sources, compiled at first use.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("paceline", "model", "native")
GLIBC = "2.28"
"""The oldest glibc of torch's wheels. Zig links for any version; other compilers link for the installed one."""


class NativeBuildHook(BuildHookInterface[Any]):
    """Found by Hatchling in this file."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """`version`: "standard", or "editable", which compiles at first use."""
        if version == "editable":
            return
        sources = Path(self.root) / NATIVE
        build = load(sources / "build.py")
        compiler = build.find_compiler()
        if compiler is None:
            self.app.display_warning("no C++ compiler: this wheel has the native pass's sources alone")
            return
        self._folder = tempfile.mkdtemp(prefix="paceline-wheel-")
        try:
            libraries = compiled(build, compiler, sources, Path(self._folder))
        except build.NativeUnavailableError as error:
            self.app.display_warning(f"this wheel has the native pass's sources alone: {error}")
            return
        if not libraries:
            return  # no native code for this architecture
        build_data["force_include"] |= {str(each): str(NATIVE / "ready" / each.name) for each in libraries}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag(compiler.is_zig)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(getattr(self, "_folder", ""), ignore_errors=True)


def load(path: Path) -> ModuleType:
    """Import one module without its parent packages, whose dependencies the build machine may lack."""
    spec = importlib.util.spec_from_file_location("paceline_native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compiled(build: ModuleType, compiler: Any, sources: Path, folder: Path) -> list[Path]:
    """One library for each instruction set. Raises the builder's `NativeUnavailableError`."""
    machine = platform.machine()
    if compiler.is_zig and sys.platform == "linux":
        compiler = type(compiler)((*compiler.command, "-target", f"{machine}-linux-gnu.{GLIBC}"))
    isas = build.ISAS.get(machine, ())
    return [build.compile_library(sources, isa, compiler, folder, "ready", link_flags=("-s",)) for isa in isas]


def tag(any_linux: bool) -> str:
    """The platform tag of the wheel."""
    if any_linux and sys.platform == "linux":
        return f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
