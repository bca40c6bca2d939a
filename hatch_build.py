"""A wheel carries the native pass compiled, where the machine that builds it has a C++ compiler.

One library for each instruction set of this kind of machine; which one is loaded the CPU decides. Without a compiler,
or if it fails, the wheel is one for every platform, with the sources alone: they are compiled at their first use.
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
"""The oldest that torch's wheels run with. Zig links for any; other compilers for the one that they have."""


class NativeBuildHook(BuildHookInterface[Any]):
    """Hatchling finds it in this file."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """`version`: "standard", or "editable", which compiles at its first use as every clone does."""
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
            return  # a kind of machine that there is no native code for
        build_data["force_include"] |= {str(each): str(NATIVE / "ready" / each.name) for each in libraries}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag(compiler.is_zig)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(getattr(self, "_folder", ""), ignore_errors=True)


def load(path: Path) -> ModuleType:
    """A module of ours, without the packages around it: they import what a machine that builds does not have."""
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
    """The platform in the wheel's name."""
    if any_linux and sys.platform == "linux":
        return f"manylinux_{GLIBC.replace('.', '_')}_{platform.machine()}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
