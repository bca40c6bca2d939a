"""The contract between builds: its fields, names and generated stubs. Unknown fields: `test_frames.py`."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version

from tests.contract.agreed import AGREED, CALLS, ENUMS, FIELDS, FILES, contract


def test_the_contract_is_unchanged() -> None:
    """`make proto` adds lines. Lines change or go only with a new minor version: older builds rely on them."""
    first, *agreed = AGREED.read_text().splitlines()
    assert first == f"paceline {'.'.join(version('paceline').split('.')[:2])}"
    assert agreed == contract()


def test_stubs_are_fresh() -> None:
    command = [sys.executable, "proto/generate.py", "--check"]
    check = subprocess.run(command, cwd=AGREED.parents[1], capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stderr


def test_names_follow_the_standard_rules_of_buf() -> None:
    """The rules that proto/buf.yaml names."""
    for file in FILES:
        assert (file.package, file.name.rpartition("/")[0]) == ("paceline.v1", "paceline/v1")
        assert all(service.endswith("Service") for service in file.services_by_name)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", field.name) for field in FIELDS)
    for enum in ENUMS:
        prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", enum.name).upper()
        assert enum.values[0].name == f"{prefix}_UNSPECIFIED"
        assert all(value.name.startswith(f"{prefix}_") for value in enum.values)
    types = [each.full_name for call in CALLS for each in (call.input_type, call.output_type)]
    assert len(set(types)) == len(types)
