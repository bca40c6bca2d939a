"""Default prompts: code of the standard library up to a function's header, and questions about its modules.

The training texts of the shipped models leave these files out.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

CONTEXT_LINES = 24
"""Lines of a code prompt; the last one is a function's header."""
CODE_FILES = ("textwrap.py", "statistics.py", "fractions.py", "shlex.py")
QUESTIONS = (
    "What does json.dumps do?",  # the only one in the training texts
    "What does textwrap.dedent do?",
    "How do I use heapq.heappush?",
    "Explain statistics.median.",
)


def code_prompts() -> list[str]:
    """The middle function's header of each of CODE_FILES, and the lines before it."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = [(folder / name).read_text(encoding="utf-8", errors="replace") for name in CODE_FILES]
    return [_until_a_function(text.splitlines(keepends=True)) for text in texts]


def _until_a_function(lines: Sequence[str]) -> str:
    headers = [number for number, line in enumerate(lines) if line.lstrip().startswith("def ") and line.endswith(":\n")]
    end = headers[len(headers) // 2] + 1
    return "".join(lines[max(end - CONTEXT_LINES, 0) : end])
