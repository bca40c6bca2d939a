"""Training text from a user's files: reading, refusals, and held-out documents."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from paceline.text import Tokenizer
from paceline_lab.training.family.token_corpus import save_documents
from paceline_lab.training.heads.text_files import TextError, divided, read_documents
from tests.helpers.checkpoints import save_checkpoint

END = 2
CHAT = [{"role": "user", "content": "What does len do?"}, {"role": "assistant", "content": "It counts."}]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose tokens are numbers, without a chat template."""
    return str(save_checkpoint(tmp_path_factory.mktemp("target")))


def written(folder: Path, *entries: Any) -> Path:
    path = folder / "some.jsonl"
    path.write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries), encoding="utf-8")
    return path


def read(path: Path, model: str) -> list[list[int]]:
    return [document.tolist() for document in read_documents([path], model, [END])]


def test_a_line_is_a_document(plain: str, tmp_path: Path) -> None:
    path = written(tmp_path, {"text": "3 1 4"}, {"prompt": "1 5", "completion": " 9"}, {"text": ""})
    assert read(path, plain) == [[3, 1, 4, END], [1, 5, 9, END], [END]]


def test_empty_lines_are_skipped(plain: str, tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('\n{"text": "3"}\r\n  \n{"text": "4"}\n\n')
    assert read(path, plain) == [[3, END], [4, END]]


def test_a_string_may_contain_other_line_ends(tmp_path: Path) -> None:
    """JSON allows them; `str.splitlines` would split there."""
    text = "a\u2028b\x85c\x0bd"
    [ids] = read(written(tmp_path, {"text": text}), "pydoc")
    assert Tokenizer.load("pydoc").decode(ids[:-1]) == text


def test_a_chat_is_rendered_with_the_template(tmp_path: Path) -> None:
    [ids] = read(written(tmp_path, {"messages": CHAT, "text": "not this"}), "pydoc")
    shown = Tokenizer.load("pydoc").decode(ids[:-1], skip_special_tokens=False)
    assert shown.startswith("<|im_start|>user\nWhat does len do?<|im_end|>")
    assert shown.rstrip().endswith("It counts.<|im_end|>")
    assert ids[-1] == END


def test_without_a_template_the_text_is_used(plain: str, tmp_path: Path) -> None:
    assert read(written(tmp_path, {"messages": CHAT, "text": "7"}), plain) == [[7, END]]


def test_no_bos_is_added(tmp_path: Path) -> None:
    """Templates and prompts have their own BOS."""
    folder = save_checkpoint(tmp_path / "target")
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single="9 $A", special_tokens=[("9", 9)])
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer.load(str(folder)).encode("3") == [9, 3]
    assert read(written(tmp_path, {"text": "3"}), str(folder)) == [[3, END]]


@pytest.mark.parametrize("suffix", [".txt", ".md", ".py"])
def test_any_other_file_is_one_document(plain: str, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"some{suffix}"
    path.write_text("3 1\n\n4\n")
    assert read(path, plain) == [[3, 1, 4, END]]


def test_text_is_utf_8_wherever_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("locale.getpreferredencoding", lambda *_: "ascii")
    path = tmp_path / "some.txt"
    path.write_bytes("Grüße".encode())
    [ids] = read(path, "pydoc")
    assert Tokenizer.load("pydoc").decode(ids[:-1]) == "Grüße"


def test_stored_ids_are_unchanged(plain: str, tmp_path: Path) -> None:
    documents = [np.array([3, 1, 4], dtype=np.uint16), np.array([1, 5], dtype=np.uint16)]
    save_documents(tmp_path / "some.npz", documents)
    assert read(tmp_path / "some.npz", plain) == [[3, 1, 4], [1, 5]]


def test_files_are_read_in_order_with_an_empty_end(plain: str, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("1")
    (tmp_path / "a.txt").write_text("2 3")
    documents = read_documents([tmp_path / "b.txt", tmp_path / "a.txt"], plain, [])
    assert [document.tolist() for document in documents] == [[1], [2, 3]]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "no JSON"),
        ('{"txt": "1"}', "needs `text`"),
        ('{"text": 3}', "needs `text`"),
        ('{"prompt": "1"}', "needs `text`"),
        ('["1"]', "needs `text`"),
        ('{"messages": [{"role": "user", "content": "1"}]}', "a chat template"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(plain: str, tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(f'{{"text": "1"}}\n\n{line}\n')
    with pytest.raises(TextError, match=rf"^{path}, line 3: .*{complaint}"):
        read(path, plain)


def test_a_chat_that_the_template_refuses_is_named_too(tmp_path: Path) -> None:
    path = written(tmp_path, {"messages": CHAT}, {"messages": [1, {}]})
    with pytest.raises(TextError, match=rf"^{path}, line 2: the chat template refuses it"):
        read(path, "pydoc")


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("some.csv", b"1", r"is in \.jsonl, \.npz, \.txt"),
        ("some.txt", b"\xff\xfe", "not UTF-8"),
        ("some.jsonl", b'{"text": "\xff"}', "not UTF-8"),
        ("some.npz", b"", "not what save_documents writes"),
        ("some.npz", b"PK\x03\x04 half", "not what save_documents writes"),
    ],
)
def test_a_file_of_another_kind_is_named(plain: str, tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TextError, match=rf"^{tmp_path / name}: .*{complaint}"):
        read(tmp_path / name, plain)


def test_arrays_of_something_else_are_refused(plain: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "some.npz", tokens=np.arange(3))
    with pytest.raises(TextError, match="not what save_documents writes"):
        read(tmp_path / "some.npz", plain)


# What is held out


@pytest.mark.parametrize("count", [2, 3, 7, 49, 50, 75, 100, 1001, 3200, 9999])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.6])
def test_every_document_is_for_training_or_held_out(count: int, share: float) -> None:
    documents = [np.array([n]) for n in range(count)]
    kept, held_out = (sorted(int(d[0]) for d in part) for part in divided(documents, share))
    assert sorted(kept + held_out) == list(range(count))
    assert 1 <= len(held_out) == min(64, max(1, round(share * count)))
    gaps = [later - earlier for earlier, later in pairwise(held_out)]
    assert not gaps or max(gaps) - min(gaps) <= 1  # of every part of the text


def test_documents_keep_their_order() -> None:
    kept, held_out = divided([np.array([n]) for n in range(200)])
    assert [int(d[0]) for d in kept] == sorted(int(d[0]) for d in kept)
    assert [int(d[0]) for d in held_out] == [25, 75, 125, 175]


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_documents_are_not_divided(count: int) -> None:
    with pytest.raises(TextError, match=rf"^{count} documents cannot be divided.*--held-out"):
        divided([np.array([1])] * count)
