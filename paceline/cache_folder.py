"""Where downloaded and compiled files are kept: $PACELINE_CACHE_DIR, $XDG_CACHE_HOME/paceline or ~/.cache/paceline."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def cache_folder(name: str) -> Path:
    """A folder in the cache, created if it is missing.

    Raises `OSError` if it cannot be created or another user can write to it, `RuntimeError` if the user has no home.
    """
    given, xdg = os.environ.get("PACELINE_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    base = Path(given) if given else Path(xdg or Path.home() / ".cache") / "paceline"
    folder = (base / name).resolve()
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)
    for each in (folder, *folder.parents):
        if not is_safe(each):
            raise PermissionError(f"others may write to {each}")
    return folder


def is_safe(path: Path) -> bool:
    """Whether only this user and root can replace this file, or the files of this folder."""
    status = path.lstat()
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    return status.st_uid in (os.geteuid(), 0) and (not writable or bool(sticky))
