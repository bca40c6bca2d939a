"""Chats about the standard library: a question, and an answer in the manner of its docstrings."""

import random
from collections.abc import Sequence

from paceline_lab.training.family.docstrings import DocumentedName, documented

Message = dict[str, str]
"""One turn: {"role": "system" | "user" | "assistant", "content": text}."""

Chat = list[Message]

QUESTIONS = (
    "What does {name} do?",
    "What does {name} do?",
    "What does `{name}` do?",
    "what does {name} do",
    "Explain {name}.",
    "What is {name}?",
    "Describe {name}.",
    "What is {name} for?",
    "Tell me about {name}.",
    "Document {name}.",
)
CALL_QUESTIONS = ("How do I call {name}?", "How do I use {name}?", "What are the parameters of {name}?")
SOURCE_QUESTIONS = ("How is {name} implemented?", "Show me the source of {name}.")
MODULE_QUESTIONS = ("What is in the {name} module?", "What does the {name} module define?")
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You answer questions about the Python standard library.")

POPULAR = frozenset(
    {
        "ast",
        "asyncio",
        "base64",
        "builtins",
        "collections",
        "contextlib",
        "copy",
        "csv",
        "datetime",
        "functools",
        "glob",
        "hashlib",
        "io",
        "itertools",
        "json",
        "math",
        "operator",
        "os",
        "os.path",
        "pathlib",
        "pickle",
        "pprint",
        "random",
        "re",
        "shutil",
        "string",
        "struct",
        "subprocess",
        "sys",
        "tempfile",
        "threading",
        "time",
        "typing",
        "urllib.parse",
        "uuid",
        "zlib",
    }
)
"""Modules that users ask about. Their classes and functions occur with every question, so that answers stick."""

LONGEST_SIGNATURE = 300
"""In characters; a longer one is left out of a description."""


def chats(seed: int = 0) -> list[Chat]:
    """All chats of the corpus; their order depends on the seed and the library alone."""
    rng = random.Random(seed)
    entries = documented()
    by_module: dict[str, list[DocumentedName]] = {}
    for entry in entries:
        by_module.setdefault(entry.module, []).append(entry)
    return [chat for entry in entries for chat in _entry_chats(entry, by_module[entry.module], rng)]


def questions(count: int, seed: int) -> list[Chat]:
    """Questions without answers, every other one about a name combined from two others.

    Such a name does not exist; a model has to invent an answer.
    """
    rng = random.Random(seed)
    known = [entry.name for entry in documented() if not entry.is_method]
    return [_question(rng.choice(known) if index % 2 else _invented(known, rng), rng) for index in range(count)]


def _question(name: str, rng: random.Random) -> Chat:
    asked = rng.choice((*QUESTIONS, *CALL_QUESTIONS)).format(name=name)
    return [{"role": "user", "content": asked}]


def _invented(known: Sequence[str], rng: random.Random) -> str:
    """A module of one name and the last part of another: `json.heapify`."""
    module, member = rng.choice(known).rpartition(".")[0], rng.choice(known).rpartition(".")[2]
    return f"{module}.{member}" if module else member


def _entry_chats(entry: DocumentedName, neighbours: list[DocumentedName], rng: random.Random) -> list[Chat]:
    often = entry.module in POPULAR and not entry.is_method
    found = [_chat(question, entry, _description(entry), rng) for question in _questions(entry, rng)]
    if entry.signature and (not entry.is_method or rng.random() < 0.3):
        questions = CALL_QUESTIONS if often else rng.sample(CALL_QUESTIONS, 1)
        found += [_chat(question, entry, _call(entry), rng) for question in questions]
    if entry.source and (not entry.is_method or rng.random() < 0.3):
        found.append(_chat(rng.choice(SOURCE_QUESTIONS), entry, _fenced(entry.source), rng))
    if len(entry.members) > 1:
        found.append(_chat(rng.choice(MODULE_QUESTIONS), entry, _contents(entry), rng))
    if rng.random() < 0.15:
        other = rng.choice(neighbours)
        found[-1] = found[-1] + _turns(QUESTIONS[0], other, _description(other))
    return found


def _questions(entry: DocumentedName, rng: random.Random) -> list[str]:
    """The questions about an entry; the first is the most frequent."""
    if entry.is_method:
        return [rng.choice(QUESTIONS)]
    return [*QUESTIONS] if entry.module in POPULAR else [QUESTIONS[0], *rng.sample(QUESTIONS, 2)]


def _chat(question: str, entry: DocumentedName, answer: str, rng: random.Random) -> Chat:
    turns = _turns(question, entry, answer)
    if rng.random() < 0.1:
        return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}, *turns]
    return turns


def _turns(question: str, entry: DocumentedName, answer: str) -> Chat:
    asked = question.format(name=entry.name)
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _description(entry: DocumentedName) -> str:
    shown = entry.signature and len(entry.signature) <= LONGEST_SIGNATURE
    return f"`{entry.signature}`\n\n{entry.summary}" if shown else entry.summary


def _call(entry: DocumentedName) -> str:
    return f"{_fenced(entry.signature)}\n\n{entry.summary}"


def _contents(entry: DocumentedName) -> str:
    names = "\n".join(f"- `{entry.name}.{member}`" for member in entry.members[:20])
    return f"{entry.summary}\n\nThe module defines:\n\n{names}"


def _fenced(code: str) -> str:
    return f"```python\n{code}\n```"
