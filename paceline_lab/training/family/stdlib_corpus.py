"""The training text: the Python standard library's own sources, as installed with Python."""

import sysconfig
from pathlib import Path

HELD_OUT = (
    "bisect.py",
    "calendar.py",
    "colorsys.py",
    "fnmatch.py",
    "fractions.py",
    "graphlib.py",
    "heapq.py",
    "queue.py",
    "sched.py",
    "shlex.py",
    "statistics.py",
    "textwrap.py",
)
"""Library files excluded from training text, chats and tokenizer; benchmarks and tests may use them."""

EXCLUDED_FOLDERS = frozenset(
    {
        "__phello__",
        "__pycache__",
        "dist-packages",
        "distutils",
        "encodings",
        "ensurepip",
        "idle_test",
        "idlelib",
        "lib2to3",
        "msilib",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "tkinter",
        "turtledemo",
    }
)
"""Third-party code, tests, character tables, and packages that newer Pythons removed."""

EXCLUDED_FILES = frozenset({"_pydecimal.py", "antigravity.py", "html/entities.py", "this.py", "turtle.py"})
"""Tables, jokes, and large files of little use."""

REMOVED_FILES = frozenset(
    {
        "aifc.py",
        "asynchat.py",
        "asyncore.py",
        "cgi.py",
        "cgitb.py",
        "chunk.py",
        "crypt.py",
        "imghdr.py",
        "imp.py",
        "mailcap.py",
        "nntplib.py",
        "pipes.py",
        "smtpd.py",
        "sndhdr.py",
        "sunau.py",
        "telnetlib.py",
        "uu.py",
        "xdrlib.py",
    }
)
"""Modules that Python 3.13 removed."""


def stdlib() -> Path:
    """The folder that holds the standard library of the running Python."""
    return Path(sysconfig.get_paths()["stdlib"])


def held_out_files() -> list[Path]:
    """The files of HELD_OUT, in its order."""
    return [stdlib() / name for name in HELD_OUT]


def source_files() -> list[Path]:
    """Every training file, sorted by path."""
    root = stdlib()
    return sorted(path for path in root.rglob("*.py") if _is_wanted(path.relative_to(root)))


def read_source(path: Path) -> str:
    """The text of a source file; the few bytes that are not UTF-8 are replaced."""
    return path.read_text(encoding="utf-8", errors="replace")


def source_texts() -> list[str]:
    """The text of every training file that is not empty."""
    texts = (read_source(path) for path in source_files())
    return [text for text in texts if text.strip()]


def module_name(path: Path) -> str:
    """The dotted name under which a library file is imported: `json/decoder.py` is `json.decoder`."""
    parts = path.relative_to(stdlib()).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_wanted(relative: Path) -> bool:
    name = relative.as_posix()
    generated = relative.name.startswith("_sysconfigdata")
    in_excluded_folder = not EXCLUDED_FOLDERS.isdisjoint(relative.parts[:-1])
    excluded = name in EXCLUDED_FILES or name in REMOVED_FILES
    return not (generated or in_excluded_folder or excluded or name in HELD_OUT)
