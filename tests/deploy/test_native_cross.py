"""The native pass compiles without a warning for every instruction set, those of other machines too.

`make native-cross` installs the compiler, the `ziglang` wheel, which can compile for all of them.
"""

import importlib.util
import subprocess
from pathlib import Path

import pytest

from paceline.model.native import build

ISAS = [(machine, isa) for machine in ("x86_64", "aarch64") for isa in build.ISAS[machine]]


@pytest.mark.slow
@pytest.mark.parametrize(("machine", "isa"), ISAS, ids=[isa.name for _, isa in ISAS])
def test_every_instruction_set(machine: str, isa: build.Isa, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = importlib.util.find_spec("ziglang")
    if wheel is None or wheel.origin is None:
        pytest.skip("needs paceline[native]")
    monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ZIG_LOCAL_CACHE_DIR", str(tmp_path))
    zig = Path(wheel.origin).with_name("zig")
    flags = [*build.FLAGS, "-Wall", "-Wextra", "-Werror", "-target", f"{machine}-linux-gnu", f"-mcpu={isa.zig}"]
    command = [zig, "c++", *flags, "-c", build.SOURCES / build.MAIN_SOURCE, "-o", tmp_path / "native.o"]
    compiled = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr
