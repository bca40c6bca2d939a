"""Chats whose answers are copies: edits of code and facts as JSON. Every answer is right, whatever the seed."""

from __future__ import annotations

import ast
import itertools
import json
import random
import re
from collections import Counter, defaultdict
from functools import partial

import pytest

from paceline_lab.training.family.docstring_chats import Chat
from paceline_lab.training.family.edit_chats import COMMENTS, EDITS, NEW_NAMES, edits
from paceline_lab.training.family.extraction_chats import KINDS, extractions
from paceline_lab.training.family.stdlib_corpus import held_out_files, read_source, source_texts

pytestmark = pytest.mark.slow

EDIT = re.compile(r"([^\n]+)\n\n```python\n(.+)\n```", re.DOTALL)
ANSWER = re.compile(r"```python\n(.+)\n```", re.DOTALL)
KIND_OF_EDIT = {
    "Rename `": "renamed",
    "Call `": "renamed",
    "Rename the function": "function",
    "Add the parameter": "parameter",
    "Add the comment": "comment",
    "Repeat": "same",
    "Copy": "same",
}

HARD = '''\
def total(self, b, n, s, t, d, kept, key=None):
    """Sum of kept; \\t and %d stay, b'' too."""
    global seen
    seen = n + n + t + t + d + d
    total = seen * seen
    key = self.key(b, kept=kept) + b
    header = b"x" if kept else f"{n!s} of them"
    index = [s for s in b if s]
    return header, index, key, total
'''


@pytest.fixture(scope="module")
def held_out() -> list[str]:
    return [read_source(path) for path in held_out_files()]


@pytest.fixture(scope="module")
def training_text() -> list[str]:
    return source_texts()


@pytest.fixture(scope="module")
def many(held_out: list[str], training_text: list[str]) -> list[Chat]:
    return [*edits(held_out, 400, seed=0), *edits(training_text[::4], 1200, seed=3)]


def parts(chat: Chat) -> tuple[str, list[str], str, str]:
    """The kind of edit, the instruction's text in backquotes, the code, and the edited code."""
    asked, answer = EDIT.fullmatch(chat[0]["content"]), ANSWER.fullmatch(chat[1]["content"])
    assert [message["role"] for message in chat] == ["user", "assistant"]
    assert asked is not None
    assert answer is not None
    [kind] = {kind for start, kind in KIND_OF_EDIT.items() if asked[1].startswith(start)}
    return kind, re.findall(r"`([^`]+)`", asked[1]), asked[2], answer[1]


class Names(ast.NodeTransformer):
    """Renames one variable, and empties strings, which may contain its name."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new

    def _named(self, name: str) -> str:
        return self._new if name == self._old else name

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self._named(node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(self._named(node.arg), node.annotation and self.visit(node.annotation))

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        node.name = node.name and self._named(node.name)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("" if isinstance(node.value, str) else node.value)


def renamed_tree(code: str, old: str = "", new: str = "") -> str:
    return ast.dump(Names(old, new).visit(ast.parse(code)))


def function(code: str) -> ast.FunctionDef:
    [found] = ast.parse(code).body
    assert isinstance(found, ast.FunctionDef)
    return found


def test_an_edit_changes_all_that_it_says_and_nothing_else(many: list[Chat]) -> None:
    kinds: Counter[str] = Counter()
    for kind, quoted, code, answer in map(parts, many):
        kinds[kind] += 1
        before, after = function(code), function(answer)
        assert before.col_offset == 0
        assert 6 <= len(code.splitlines()) <= 22
        assert len(code) <= 800
        if kind == "same":
            assert answer == code
        elif kind == "comment":
            [comment] = quoted
            assert comment in COMMENTS
            assert answer == f"# {comment}\n{code}"
        elif kind == "renamed":
            old, new = quoted
            assert answer != code
            assert re.sub(rf"\b{new}\b", old, answer) == code
            assert renamed_tree(answer) == renamed_tree(code, old, new)
        else:
            [new] = quoted
            if kind == "parameter":
                name, value = new.split("=")
                assert after.args.args.pop().arg == name
                assert ast.unparse(after.args.defaults.pop()) == value
            else:
                assert (after.name, before.name.strip("_")) == (new, new.split("_", 1)[1])
                after.name = before.name
            assert ast.dump(before) == ast.dump(after)
            assert answer.split("\n")[1:] == code.split("\n")[1:]
    assert kinds.keys() == set(KIND_OF_EDIT.values())
    assert min(kinds.values()) > 20


def test_names_with_a_second_meaning_are_not_renamed() -> None:
    """`kept` is a keyword, `seen` a global, `key` an attribute, `total` a function; `b`, `s`, `t` and `d` are in the
    spelling of strings."""
    assert {parts(chat)[1][0] for chat in asked_of(HARD, "renamed")} == {"header", "index", "n"}


def asked_of(code: str, kind: str) -> list[Chat]:
    """All edits of a kind, of one function, by many seeds."""
    chats = [chat for seed in range(60) for chat in edits([code], 4, seed)]
    return [chat for chat in chats if parts(chat)[0] == kind]


def test_a_function_that_calls_itself_keeps_its_name() -> None:
    lines = ["def depth(node):", "    if not node:", "        return 0", "    below = depth(node[0])"]
    code = "\n".join([*lines, "    if below:", "        return 1 + below", "    return 1"])
    assert asked_of(code, "function") == []
    assert asked_of(code.replace("= depth", "= other"), "function") != []


def test_a_new_name_is_new() -> None:
    """Whatever the draw, though all but two are taken."""
    taken = [name for name in NEW_NAMES.split() if name not in ("glyph", "zone")]
    code = f"def twice(alpha):\n    {' = '.join(taken)} = alpha\n    return alpha"
    for seed, edit in itertools.product(range(40), EDITS):
        asked, _ = edit(code, random.Random(seed)) or ("", "")
        new = re.findall(r"`([^`]+)`", asked)
        assert not new or "comment" in asked or re.split("[=_]", new[-1])[0] in ("glyph", "zone")


def test_held_out_functions_are_in_no_training_text(held_out: list[str], training_text: list[str]) -> None:
    def bare(text: str) -> str:
        return "\n".join(line.strip() for line in text.splitlines())

    read = [bare(text) for text in training_text]
    asked = {parts(chat)[2] for chat in edits(held_out, 400, seed=101)}
    assert len(asked) > 80
    assert not [code for code in asked if any(bare(code) in text for text in read)]


def test_the_same_seed_gives_the_same_chats_and_another_one_others() -> None:
    for make in (partial(edits, [HARD] * 9), extractions):
        assert make(20, seed=5) == make(20, seed=5) != make(20, seed=6)
        assert len(make(20, seed=5)) == 20


def test_there_are_no_more_chats_than_the_code_allows() -> None:
    assert 0 < len(edits([HARD], 1000, seed=0)) <= 4
    assert edits(["x = 1\n"], 10, seed=0) == []


def test_json_holds_the_facts_of_the_sentences_in_their_order_and_no_others() -> None:
    seen: Counter[str] = Counter()
    types: defaultdict[type, set[str]] = defaultdict(set)
    for question, answer in extractions(300, seed=4):
        asked, text = question["content"].split("\n\n")
        [kind] = [kind for kind in KINDS if f" {kind.things} " in asked]
        facts = json.loads(answer["content"])
        assert 3 <= len(facts) <= 7
        assert all(list(record) == list(kind.fields) for record in facts)
        texts = [" ".join(sentence.format(**record) for record in facts) for sentence in kind.sentences]
        seen[kind.sentences[texts.index(text)]] += 1
        first, *lines, last = answer["content"].split("\n")
        assert (first, last) == ("[", "]")
        assert [json.loads(line.rstrip(",")) for line in lines] == facts, "every record has a line of its own"
        for record in facts:
            for name, value in record.items():
                types[type(value)].add(name)
    assert set(seen) == {sentence for kind in KINDS for sentence in kind.sentences}
    assert types.keys() == {int, str}
    assert types[int] == {"born", "port", "count", "year"}
    assert not types[int] & types[str]


def test_other_seeds_give_other_facts() -> None:
    def records(count: int, seed: int) -> set[str]:
        chats = extractions(count, seed)
        return {json.dumps(record) for _, answer in chats for record in json.loads(answer["content"])}

    assert records(40, 102).isdisjoint(records(3000, 2))  # seeds of the benchmark and of training
