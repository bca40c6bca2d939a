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


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The files of a wheel, as far as they matter here."""
    folder = tmp_path / "project"
    native = folder / "paceline" / "model" / "native"
    native.mkdir(parents=True)
    write_sources(native)
    (folder / "paceline_services").mkdir()
    ours = ("__init__.py", "model/native/__init__.py", "model/native/build.py")
    for file in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", *(f"paceline/{each}" for each in ours)):
        shutil.copy(ROOT / file, folder / file)
    return folder


def wheel(project: Path, how: str = "build_wheel") -> Path:
    """As pip asks for one."""
    out = project.with_name("wheels")
    command = [sys.executable, "-c", BUILD, how, str(out)]
    made = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
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
    ready = [Path(name) for name in native(made) - SOURCES]
    assert native(made) > SOURCES
    assert sorted(path.name.split("--")[0] for path in ready) == sorted(isa.name for isa in ISAS)
    assert {path.parent.name for path in ready} == {"ready"}
    assert "-py3-none-any" not in made.name
    zipfile.ZipFile(made).extractall(tmp_path / "installed")
    folder = tmp_path / "installed" / "paceline" / "model" / "native"
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("PACELINE_NATIVE", raising=False)
    command = [sys.executable, "-c", ASK, str(folder), str(folder / "build.py")]
    asked = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (asked.stdout, asked.stderr) == ("42\n", "")
    assert not (tmp_path / "cache").exists()


def test_a_wheel_without_a_compiler_that_works_has_the_sources(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert native(wheel(project)) == SOURCES
    fake = FakeCompiler(tmp_path / "fake-c++", tmp_path)
    fake.behave(before="exit 1")
    monkeypatch.setenv("CXX", str(fake.path))
    made = wheel(project)
    assert made.name.endswith("-py3-none-any.whl")
    assert native(made) == SOURCES


def test_a_wheel_has_the_files_of_the_pages(project: Path) -> None:
    pages = Path("services", "gateway", "pages")
    shutil.copytree(ROOT / pages, project / "paceline_services" / "gateway" / "pages")
    packed = {Path(name).name for name in zipfile.ZipFile(wheel(project)).namelist() if "gateway/pages/static/" in name}
    assert packed == {file.name for file in (ROOT / pages / "static").iterdir()}
    assert {"playground.html", "operator.html", "base.css", "playground.js"} < packed


@pytest.mark.parametrize("name", ["g++", "zig"])
def test_the_platform_in_a_wheels_name(
    project: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zig links for glibc 2.28 and later; other compilers link with the installed one."""
    (tmp_path / "answer").write_text("no library, but it is never loaded")
    fake = FakeCompiler(tmp_path / name, tmp_path / "answer")
    monkeypatch.setenv("CXX", str(fake.path))
    any_linux = name == "zig" and sys.platform == "linux"
    own = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    expected = f"manylinux_2_28_{platform.machine()}" if any_linux else own
    assert wheel(project).name.endswith(f"-py3-none-{expected}.whl")
    assert {f"-target {platform.machine()}-linux-gnu.2.28" in line for line in fake.calls if "native.o" in line} == {
        any_linux
    }


def test_a_clone_compiles_at_its_first_use(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCompiler(tmp_path / "fake-c++", tmp_path)
    monkeypatch.setenv("CXX", str(fake.path))
    wheel(project, "build_editable")
    assert fake.calls == []
