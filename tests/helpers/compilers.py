"""Sources of a small library that stands in for the native pass, and a compiler that fails as a test wants."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from paceline.model.native import build

SOURCE = '#include "answer.hpp"\nextern "C" int answer() { return ANSWER; }\n'
CP = shutil.which("cp")
VERSION = 'echo "g++ (Fake 9.9.9-1) 1.2.3"'
FAKE = """\
#!/bin/sh
echo "$*" >> {log}
case " $* " in *" --version "*) {version}; exit;; esac
{before}
while [ $# -gt 0 ]; do [ "$1" = -o ] && out="$2"; shift; done
{write}
"""
# Loads build.py alone, as the wheel's build hook does: the package around it imports torch.
ASK = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("build", sys.argv[2])
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
print(build.native_library(pathlib.Path(sys.argv[1])).answer())
"""


def write_sources(folder: Path, value: int = 42) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "native.cpp").write_text(SOURCE)
    (folder / "answer.hpp").write_text(f"#define ANSWER {value}\n")
    return folder


def real_compiler() -> build.Compiler:
    """This machine's compiler. Without one the test is skipped, except in CI."""
    compiler = build.find_compiler()
    if compiler is None and not os.environ.get("CI"):
        pytest.skip("there is no C++ compiler")
    assert compiler is not None
    return compiler


class FakeCompiler:
    """A compiler that copies a library, logs its arguments, and fails as a test wants."""

    def __init__(self, path: Path, library: Path) -> None:
        self.path = path
        self._log = path.with_name("calls")
        self._copy = f'{CP} {library} "$out"'
        self.behave()

    def behave(self, before: str = "", write: str | None = None, version: str = VERSION) -> None:
        """Shell commands. `write`: instead of the one that writes the library to $out."""
        write = self._copy if write is None else write
        self.path.write_text(FAKE.format(log=self._log, before=before, write=write, version=version))
        self.path.chmod(0o755)
        os.utime(self.path, ns=(0, 0))  # so that the compiler's key stays the same

    @property
    def calls(self) -> list[str]:
        """The arguments of every call."""
        return self._log.read_text().splitlines() if self._log.exists() else []

    @property
    def compilations(self) -> list[str]:
        """The arguments of every call that compiles."""
        return [call for call in self.calls if " -c " in f" {call} "]

    @property
    def compiled(self) -> int:
        return len(self.compilations)
