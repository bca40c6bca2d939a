"""Our tokenizer of a file gives the ids of llama.cpp's server on 10,000 strings."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sysconfig
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.cli.deployment import LOOPBACK, free_ports
from paceline.gguf.gguf_file import GgufFile
from paceline.text import Tokenizer
from tests.helpers.waiting import within

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

COUNT = 10_000
START_S = 120.0
END = "</s>"
"""Text in Qwen's vocabulary, which llama.cpp takes for a special token: docs/gguf.md."""
SEPARATOR = -1
"""No token has this id. The server tokenizes the strings of a list one after another and keeps numbers as they are."""
SPECIAL_TYPES = (3, 4)
"""Control and user-defined tokens."""
WORDS = (
    "naïve straße e\u0301té A\u030angstrom it's IT'S 'LL don't we'Ve привет Ελληνικά עברית العربية हिन्दी ภาษาไทย "
    "한국어 東京タワー 你好世界，这是。 ﬁ ½ Ⅻ ٣४ 12 3456 7890123 3.14 1e-9 0x1F ... -- ___ ``` $x @y &amp; (a) [b] {c} "
    "<d> |e| \\n /usr/bin http://x.y/z?q=1 ∑∫ → 👍🏽 👩\u200d👩\u200d👧 🇩🇪 \u200b \u200d \ufeff \u2003 \u3000 \x85 "
    "\x0b \u2028 \x00 \x1c"
)
SPACES = ["", " ", "  ", "   ", "\t", "\t\t", "\n", "\n\n", "\r\n", "\r", " \n", "\n ", "\u00a0", "\u3000"]
SPACES += [" " * count for count in (4, 8, 17, 33, 70)]
UNASSIGNED = ("Cn", "Co", "Cs")
BLOCKS = ((0x20, 0x250), (0x250, 0x3100), (0x3100, 0xD7FF), (0xE000, 0x10FFFF))


class Strings:
    """Random strings, the same for the same seed and files."""

    def __init__(self, special: Sequence[str]) -> None:
        self._random = random.Random(46)
        self._special = special
        folders = (Path(sysconfig.get_path("stdlib")), Path(__file__).parents[2] / "docs")
        files = [*folders[0].glob("*.py"), *sorted(folders[1].rglob("*.md"))]
        self._texts = [text for file in sorted(files) if len(text := file.read_text("utf-8", "replace")) > 500]

    def draw(self, count: int) -> list[str]:
        kinds = (self._excerpt, self._excerpt, self._words, self._digits, self._characters, self._spaces, self._tokens)
        return [self._random.choice(kinds)().replace(END, "") for _ in range(count)]

    def _excerpt(self, longest: int = 400) -> str:
        text = self._random.choice(self._texts)
        start = self._random.randrange(len(text) - 20)
        return text[start : start + self._random.randrange(1, longest)]

    def _join(self, parts: Sequence[str], between: Sequence[str], most: int) -> str:
        choose = self._random.choice
        return "".join(choose(parts) + choose(between) for _ in range(self._random.randrange(1, most)))

    def _words(self) -> str:
        return self._join(WORDS.split(" "), SPACES, 30)

    def _digits(self) -> str:
        return self._join("0123456789.,-+ ٣½", [""], 60)

    def _spaces(self) -> str:
        return self._join(SPACES, ["a", "B", ".", "1", "é", "日", ""], 25)

    def _tokens(self) -> str:
        return self._join(self._special, ["", " ", "\n", "hi", "  ", "<|", "|>"], 6) + self._excerpt(50)

    def _characters(self) -> str:
        return self._join([self._character() for _ in range(20)], ["", "", "", " "], 40)

    def _character(self) -> str:
        """Any one that Unicode has assigned."""
        while (
            unicodedata.category(character := chr(self._random.randrange(*self._random.choice(BLOCKS)))) in UNASSIGNED
        ):
            pass
        return character


@contextlib.contextmanager
def running(program: Path, gguf: Path) -> Iterator[httpx.Client]:
    port, _ = free_ports(LOOPBACK, 0, 0)
    argv = [program, "-m", gguf, "--host", LOOPBACK, "--port", str(port), "-t", "1", "-c", "256", "--no-warmup"]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            with httpx.Client(base_url=f"http://{LOOPBACK}:{port}", timeout=120, trust_env=False) as client:
                next(None for _ in within(START_S) if _healthy(client))
                yield client
        finally:
            process.terminate()


def _healthy(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.get("/health").status_code == httpx.codes.OK
    return False


def server_ids(client: httpx.Client, strings: Sequence[str], **options: Any) -> list[list[int]]:
    """Ids of each string."""
    content = [part for string in strings for part in (string, SEPARATOR)]
    answer = client.post("/tokenize", json={"content": content, **options}).raise_for_status()
    ids: list[list[int]] = [[]]
    for token in answer.json()["tokens"]:
        ids.append([]) if token == SEPARATOR else ids[-1].append(token)
    assert len(ids) == len(strings) + 1
    return ids[:-1]


def special_tokens(gguf: Path) -> list[str]:
    metadata = GgufFile.open(gguf).metadata
    pairs = zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)
    return [str(token) for token, kind in pairs if kind in SPECIAL_TYPES]


@pytest.fixture(scope="module")
def server(llama_cpp: Path, path: Path) -> Iterator[httpx.Client]:
    with running(llama_cpp / "llama-server", path) as client:
        yield client


@pytest.mark.parametrize("special", [True, False])
def test_ids_equal_those_of_llama_cpp(special: bool, path: Path, server: httpx.Client) -> None:
    """With special tokens read as such, and as plain text."""
    tokenizer, strings = Tokenizer.load(str(path)), Strings(special_tokens(path)).draw(COUNT)
    expected = server_ids(server, strings, add_special=False, parse_special=special)
    ours = [
        tokenizer.encode(string, add_special_tokens=False) if special else tokenizer.encode_fragment(string)
        for string in strings
    ]
    triples = zip(strings, ours, expected, strict=True)
    assert [triple for triple in triples if triple[1] != triple[2]][:5] == []
    assert len(set(strings)) > COUNT * 0.9


def test_a_text_begins_as_in_llama_cpp(path: Path, server: httpx.Client) -> None:
    [expected] = server_ids(server, ["Begin."], add_special=True, parse_special=True)
    assert Tokenizer.load(str(path)).encode("Begin.") == expected


def test_the_one_exception(path: Path, name: str, server: httpx.Client) -> None:
    """Qwen's vocabulary has `</s>` as text."""
    [theirs] = server_ids(server, [f"a{END}b"], add_special=False, parse_special=True)
    ours = Tokenizer.load(str(path)).encode(f"a{END}b", add_special_tokens=False)
    assert (ours == theirs) == (not name.startswith("qwen"))
