"""What a process does not load, it need not pay for."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("service", ["target", "draft", "gateway"])
def test_the_process_that_speaks_loads_no_torch(service: str) -> None:
    code = (
        f"import paceline_services.{service}.__main__, sys; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
