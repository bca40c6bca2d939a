"""Services import no torch; their model processes do."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("service", ["target", "draft", "gateway"])
def test_a_service_imports_no_torch(service: str) -> None:
    code = (
        f"import paceline_services.{service}.__main__, sys; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
