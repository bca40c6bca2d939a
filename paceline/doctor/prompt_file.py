"""Prompts to measure on: a file of the user's, or default ones.

A file is .txt with one prompt on each line, or .jsonl with {"prompt": ...} or {"messages": ...}. The default prompts
are code of the standard library up to a function's header, and questions about its modules; the training texts of the
shipped models leave these files out.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.launcher import StartError
from paceline.text import Tokenizer
from paceline.text.chat_template import ChatTemplateError

Conversation = Sequence[Mapping[str, Any]]
Prompt = str | Conversation


class PromptsError(StartError):
    """Prompts that cannot be read or encoded; the message says which and why."""


def read(path: Path) -> list[Prompt]:
    """The prompts in a file. Raises `PromptsError`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PromptsError(f"{path} cannot be read: {error}") from error
    given = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not given:
        raise PromptsError(f"{path} holds no prompts: write one on each line")
    if path.suffix == ".jsonl":
        return [_parse(line, f"{path}, line {number}") for number, line in given]
    return [line for _, line in given]


def _parse(line: str, where: str) -> Prompt:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise PromptsError(f"{where} is no JSON: {error}") from error
    prompt, messages = (content.get(key) if isinstance(content, dict) else None for key in ("prompt", "messages"))
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return messages
    raise PromptsError(f'{where} has neither {{"prompt": "..."}} nor {{"messages": [...]}}')


def encoded(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids, as a server would encode the prompts. Raises `PromptsError`."""
    return [_ids(prompt, tokenizer) for prompt in prompts]


def lack_chat_template(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> bool:
    """Whether the model has a chat template and no prompt has special tokens of one."""
    if tokenizer.chat_template is None or not all(isinstance(prompt, str) for prompt in prompts):
        return False
    template_ids = tokenizer.special_ids - set(tokenizer.prefix_tokens)
    return not any(template_ids & set(ids) for ids in encoded(prompts, tokenizer))


def _ids(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt)
    elif tokenizer.chat_template is None:
        raise PromptsError('the model has no chat template: give its prompts as {"prompt": "..."}')
    else:
        ids = tokenizer.encode(_rendered(prompt, tokenizer), add_special_tokens=False)
    if not ids:
        raise PromptsError("a prompt has no token in this model's vocabulary")
    return ids


def _rendered(conversation: Conversation, tokenizer: Tokenizer) -> str:
    assert tokenizer.chat_template is not None
    try:
        return tokenizer.chat_template.render(conversation)
    except ChatTemplateError as error:
        raise PromptsError(f"the model's chat template refuses a conversation: {error}") from error


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
