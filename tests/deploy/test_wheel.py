"""Wheels with the native pass compiled, and without: of the real project around a small library in its place."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from paceline.model.native import build
from tests.deploy.helm import ROOT
from tests.helpers.compilers import ASK, FakeCompiler, real_compiler, write_sources

BUILD = "import sys; from hatchling import build; print(getattr(build, sys.argv[1])(sys.argv[2]))"
SOURCES = {f"paceline/model/native/{name}" for name in ("__init__.py", "build.py", "native.cpp", "answer.hpp")}
ISAS = build.ISAS.get(platform.machine(), ())


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The files of a wheel, as far as they matter here."""
    folder = tmp_path / "project"
    native = folder / "paceline" / "model" / "native"
    native.mkdir(parents=True)
    (folder / "paceline_services").mkdir()
    for file in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "paceline/__init__.py"):
        shutil.copy(ROOT / file, folder / file)
    for file in ("__init__.py", "build.py"):
        shutil.copy(ROOT / "paceline" / "model" / "native" / file, native / file)
    write_sources(native)
    return folder


@pytest.fixture(autouse=True)
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler unless a test sets one."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    if importlib.util.find_spec("ziglang"):  # an earlier package without a compiler
        (tmp_path / "path").mkdir()
        (tmp_path / "path" / "ziglang.py").touch()
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))


def wheel(project: Path, how: str = "build_wheel") -> Path:
    """As pip asks for one."""
    out = project.with_name("wheels")
    made = subprocess.run(
        [sys.executable, "-c", BUILD, how, str(out)], cwd=project, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    return out / made.stdout.split()[-1]


def native(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("paceline/model/native/")}


def test_a_wheel_carries_a_library_for_each_instruction_set(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    compiler = real_compiler()
    monkeypatch.setenv("CXX", " ".join(compiler.command))
    made = wheel(project)
    ready = native(made) - SOURCES
    assert native(made) > SOURCES
    assert sorted(Path(name).name.split("--")[0] for name in ready) == sorted(isa.name for isa in ISAS)
    assert {Path(name).parent.name for name in ready} == {"ready"}
    assert made.name.endswith(".whl")
    assert "-py3-none-any" not in made.name
    zipfile.ZipFile(made).extractall(tmp_path / "installed")
    folder = tmp_path / "installed" / "paceline" / "model" / "native"
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("PACELINE_NATIVE", raising=False)
    asked = subprocess.run(
        [sys.executable, "-c", ASK, str(folder), str(folder / "build.py")], capture_output=True, text=True, check=True
    )
    assert asked.stdout == "42\n"
    assert asked.stderr == ""
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("compiler", ["none", "one that fails"])
def test_a_wheel_without_a_compiler_has_the_sources(
    project: Path, tmp_path: Path, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiler != "none":
        fake = FakeCompiler(tmp_path / "fake-c++", tmp_path)
        fake.behave(before="exit 1")
        monkeypatch.setenv("CXX", str(fake.path))
    made = wheel(project)
    assert made.name.endswith("-py3-none-any.whl")
    assert native(made) == SOURCES


def test_the_platform_in_a_wheels_name(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zig links for glibc 2.28 and later; other compilers link with the installed one."""
    (tmp_path / "answer").write_text("no library, but it is never loaded")
    own = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    any_linux = f"manylinux_2_28_{platform.machine()}" if sys.platform == "linux" else own
    for name, expected in {"g++": own, "zig": any_linux}.items():
        fake = FakeCompiler(tmp_path / name, tmp_path / "answer")
        monkeypatch.setenv("CXX", str(fake.path))
        assert wheel(project).name.endswith(f"-py3-none-{expected}.whl")
        both = [f"-target {platform.machine()}-linux-gnu.2.28" in line for line in fake.calls if "native.o" in line]
        assert set(both) == {name == "zig" and sys.platform == "linux"}
        fake.path.with_name("calls").unlink()


def test_a_clone_compiles_at_its_first_use(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCompiler(tmp_path / "fake-c++", tmp_path)
    monkeypatch.setenv("CXX", str(fake.path))
    wheel(project, "build_editable")
    assert fake.calls == []
