"""The family that ships with the package, and the script that trained it."""

import ast
import copy
import io
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlamaForCausalLM

from paceline import family
from paceline_lab.training.family import family_evaluation, stdlib_corpus, training_session
from paceline_lab.training.family.distillation import target_top_probs
from paceline_lab.training.family.docstring_chats import CALL_QUESTIONS, QUESTIONS, Chat, chats, questions
from paceline_lab.training.family.docstrings import first_paragraph
from paceline_lab.training.family.family_models import (
    ATTENTION,
    deepened,
    draft_config,
    logits,
    new_model,
    next_token_loss,
    target_config,
)
from paceline_lab.training.family.family_tokenizer import END_OF_TEXT, SPECIAL, TURN_END
from paceline_lab.training.family.target_text import ANSWER, question_responses
from paceline_lab.training.family.token_corpus import Ids, corpus_stream, encode_documents, windows
from paceline_lab.training.family.trainer import Phase, Schedule, Trainer
from paceline_lab.training.family.training_session import TrainingStopped, held_out_loss_of, read_journal, train

MICRO = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "head_dim": 8,
    "max_position_embeddings": 64,
}

CHATS: list[Chat] = [
    [{"role": "user", "content": "What does len do?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<b>&'\"\n\nhi\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " b "},
        {"role": "user", "content": ""},
    ],
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(family.path("pydoc"))


@pytest.fixture(scope="module")
def plain_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(family.path("pydoc") / "tokenizer.json"))


@pytest.fixture(scope="module")
def documents(tokenizer: Any) -> list[Ids]:
    return encode_documents(tokenizer, [stdlib_corpus.read_source(path) for path in stdlib_corpus.source_files()[:8]])


@pytest.fixture(scope="module")
def conversations() -> list[Chat]:
    return chats()


def micro_trainer(documents: list[Ids], clock: Callable[[], float] = lambda: 0.0) -> Trainer[LlamaForCausalLM]:
    """A model of a few thousand weights; without a clock it stays at the start of its budget."""
    schedule = Schedule((Phase(0.5, 4, 16), Phase(1.0, 2, 32)), warmup=1e-4)
    model = new_model(target_config(**MICRO), seed=0)
    return Trainer(model, corpus_stream(documents, seed=0), next_token_loss, schedule, 20.0, clock)


# Corpus


def test_held_out_files_exist_and_are_not_read() -> None:
    held_out = stdlib_corpus.held_out_files()
    assert all(path.is_file() for path in held_out)
    assert len(set(held_out)) == 12
    assert set(held_out).isdisjoint(stdlib_corpus.source_files())


@pytest.mark.slow
def test_no_chat_documents_a_held_out_module(conversations: list[Chat]) -> None:
    held_out = "|".join(path.stem for path in stdlib_corpus.held_out_files())
    about = re.compile(rf"(What does|Explain|How do I call) `?({held_out})\b")
    assert not [chat for chat in conversations if about.match(chat[-2]["content"])]


@pytest.mark.slow
def test_no_chat_repeats_a_held_out_docstring(conversations: list[Chat]) -> None:
    text = "\n".join(message["content"] for chat in conversations for message in chat)
    trees = [ast.parse(stdlib_corpus.read_source(path)) for path in stdlib_corpus.held_out_files()]
    summaries = [first_paragraph(ast.get_docstring(tree)) for tree in trees]
    assert not [summary for summary in summaries if summary and summary in text]


def test_tests_and_foreign_packages_are_not_read() -> None:
    parts = {part for path in stdlib_corpus.source_files() for part in path.relative_to(stdlib_corpus.stdlib()).parts}
    assert parts.isdisjoint({"test", "site-packages", "idlelib", "antigravity.py", "this.py"})


@pytest.mark.slow
def test_chats_know_public_names(conversations: list[Chat]) -> None:
    known = {chat[0]["content"]: chat[1]["content"] for chat in conversations}
    assert known["What does len do?"] == "`len(obj, /)`\n\nReturn the number of items in a container."
    assert known["What does json.dumps do?"].endswith("Serialize ``obj`` to a JSON formatted ``str``.")
    assert known["What does asyncio.gather do?"].startswith("`asyncio.gather(")
    assert known["What does os.path.join do?"].startswith("`os.path.join(")


# Tokenizer


@given(st.text())
def test_text_survives_the_tokenizer(plain_tokenizer: Tokenizer, text: str) -> None:
    ids = plain_tokenizer.encode(text, add_special_tokens=False).ids
    assert plain_tokenizer.decode(ids, skip_special_tokens=False) == text


def test_indentation_is_one_token(plain_tokenizer: Tokenizer) -> None:
    tokens = plain_tokenizer.encode("if x:\n        return self.name\n").tokens
    assert len(tokens) <= 8
    assert "Ġreturn" in tokens


def test_target_and_draft_share_a_tokenizer() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        target, draft = (family.path(model) / name for model in family.NAMES)
        assert target.read_bytes() == draft.read_bytes()


def test_special_ids_are_those_of_the_model(tokenizer: Any) -> None:
    ends = GenerationConfig.from_pretrained(family.path("pydoc")).eos_token_id
    assert ends == tokenizer.convert_tokens_to_ids([TURN_END, END_OF_TEXT])
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == [0, 1, 2]
    assert tokenizer.eos_token == TURN_END
    assert len(tokenizer) == AutoConfig.from_pretrained(family.path("pydoc")).vocab_size


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_template_is_the_same_in_plain_jinja(tokenizer: Any, chat: Chat, add_generation_prompt: bool) -> None:
    shipped = (family.path("pydoc") / "chat_template.jinja").read_text()
    plain = jinja2.Template(shipped).render(messages=chat, add_generation_prompt=add_generation_prompt)
    ours = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert plain == ours
    assert plain.endswith("<|im_start|>assistant\n") == add_generation_prompt


# Batches


def test_an_epoch_predicts_every_token_once(documents: list[Ids]) -> None:
    rows = windows(documents, 64, seed=3)
    total = sum(map(len, documents))
    assert total - 64 <= rows[:, 1:].numel() + 1 <= total
    assert not torch.equal(rows, windows(documents, 64, seed=4))


def test_a_stream_goes_on_from_its_position(documents: list[Ids]) -> None:
    first, second = corpus_stream(documents, seed=1), corpus_stream(documents, seed=1)
    for _ in range(5):
        first.batch(7, 512)
    second.position = copy.copy(first.position)
    assert torch.equal(first.batch(7, 512), second.batch(7, 512))


# Training


def test_steps_lower_the_loss(documents: list[Ids]) -> None:
    trainer = micro_trainer(documents)
    losses = [trainer.step() for _ in range(30)]
    assert losses[-1] < losses[0] - 0.5


def test_a_resumed_run_is_bit_exact(documents: list[Ids], tmp_path: Path) -> None:
    """Through a change of length and the fall of the learning rate; every reading of the clock is 1 s later."""
    whole = micro_trainer(documents, count().__next__)
    for _ in range(7):
        whole.step()
    whole.save(tmp_path / "checkpoint.pt")
    resumed = micro_trainer(documents, count(100).__next__)
    resumed.load(tmp_path / "checkpoint.pt")
    for _ in range(8):
        assert whole.step() == resumed.step()
    assert whole.progress == resumed.progress
    assert whole.progress.position.length == 32
    assert all(torch.equal(p, resumed.masters[name]) for name, p in whole.masters.items())


def test_a_session_ends_with_its_budget(documents: list[Ids], tmp_path: Path) -> None:
    trainer = micro_trainer(documents, count().__next__)
    train(trainer, tmp_path / "micro", held_out_loss_of(trainer.model, documents[:1]))
    last = read_journal(tmp_path / "micro.jsonl")[-1]
    assert last["fraction"] == 1
    assert 0 < last["held_out_loss"] < 9


def test_a_stopped_session_keeps_everything(documents: list[Ids], tmp_path: Path) -> None:
    ticks = count()

    def clock() -> float:
        now = next(ticks)
        if now == 5:
            signal.raise_signal(signal.SIGTERM)
        return now

    trainer, resumed = micro_trainer(documents, clock), micro_trainer(documents)
    with pytest.raises(TrainingStopped, match=r"micro\.pt"):
        train(trainer, tmp_path / "micro", held_out_loss_of(trainer.model, documents[:1]))
    resumed.load(tmp_path / "micro.pt")
    assert resumed.progress == trainer.progress
    assert resumed.progress.step == 3


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def logging_records(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, training_session.__name__)


def session_output(documents: list[Ids], folder: Path, monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO) -> str:
    """The output of a session that records every step, each of 1 s."""
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(training_session, "STEPS_PER_RECORD", 1)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    handler = logging.StreamHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    trainer = micro_trainer(documents, count().__next__)
    train(trainer, folder / "micro", held_out_loss_of(trainer.model, documents[:1]))
    assert handler.stream is stderr
    assert sys.stderr is stderr
    return stderr.getvalue()


@pytest.mark.usefixtures("logging_records")
def test_on_a_terminal_a_bar_shows_how_far_training_is(
    documents: list[Ids], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = session_output(documents, tmp_path, monkeypatch, Terminal())
    journal = read_journal(tmp_path / "micro.jsonl")
    steps, last = [record for record in journal if "loss" in record], journal[-1]
    speed = last["tokens"] / last["seconds"]
    end = f"loss {steps[-1]['loss']:.3f} · {speed:,.0f} tokens/s · 0:00:00 left"
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]+", output)]
    assert any(line.startswith("micro ") and "100%" in line and line.rstrip().endswith(end) for line in lines)
    assert sum(line.startswith("{'step'") for line in lines) == len(journal), "a record was written into the bar"


@pytest.mark.usefixtures("logging_records")
def test_without_a_terminal_there_is_no_bar(
    documents: list[Ids], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    output = session_output(documents, tmp_path, monkeypatch, io.StringIO())
    assert output.splitlines() == [str(record) for record in read_journal(tmp_path / "micro.jsonl")]


def test_training_attention_is_plain_causal_attention() -> None:
    ours = new_model(target_config(**MICRO), seed=1)
    theirs = copy.deepcopy(ours)
    assert ours.config._attn_implementation == ATTENTION
    theirs.set_attn_implementation("sdpa")
    ids = torch.randint(4096, (2, 40), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(logits(ours, ids), logits(theirs, ids), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layers", [2, 3, 5])
def test_a_deepened_model_has_the_same_logits(layers: int) -> None:
    shallow, deeper = target_config(**MICRO), target_config(**MICRO | {"num_hidden_layers": layers})
    model = new_model(shallow, seed=4)
    ids = torch.randint(4096, (2, 40), generator=torch.Generator().manual_seed(0))
    deep = deepened(model, deeper)
    assert len(deep.model.layers) == layers
    torch.testing.assert_close(logits(deep, ids), logits(model, ids))


# The draft's lessons


@pytest.mark.slow
def test_every_other_question_is_about_an_invented_name(conversations: list[Chat]) -> None:
    def names(asked: str) -> set[str]:
        return {part.strip("?.`") for part in asked.split()} - common

    common = {part.strip("?.`") for asked in (*QUESTIONS, *CALL_QUESTIONS) for part in asked.split()}
    known = {name for chat in conversations for name in names(chat[-2]["content"])}
    invented = [not names(chat[0]["content"]) <= known for chat in questions(60, seed=0)]
    assert sum(invented[1::2]) == 0
    assert sum(invented[0::2]) > 20


def test_an_answer_ends_with_its_turn(tokenizer: Any) -> None:
    model = new_model(draft_config(**MICRO | {"max_position_embeddings": 256}), seed=5)
    model.set_attn_implementation("sdpa")
    end_of_text, turn_end = tokenizer.convert_tokens_to_ids([END_OF_TEXT, TURN_END])
    model.model.embed_tokens.weight.data[turn_end] *= 4  # frequent enough to end some answers early
    asked = questions(12, seed=1)
    documents = question_responses(model, tokenizer, asked, seed=0)
    assert len(documents) == len(asked)
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in asked]
    for document in documents:
        prompt = next(ids for ids in prompts if document[: len(ids)].tolist() == ids)
        answer = document[len(prompt) : -1].tolist()
        assert document[-1] == end_of_text
        assert turn_end not in answer[:-1]
        assert len(answer) == ANSWER or answer[-1] == turn_end


def test_divergence_from_itself_is_zero() -> None:
    model = new_model(target_config(**MICRO), seed=2)
    other = new_model(target_config(**MICRO), seed=3)
    lessons = target_top_probs(model, torch.arange(96).view(4, 24))
    rows = lessons.stream(seed=0).batch(4, 24)
    with torch.no_grad():
        own, foreign = lessons.divergence(model, rows), lessons.divergence(other, rows)
    assert float(own) == pytest.approx(0, abs=1e-4)
    assert float(foreign) > 10 * abs(float(own))


# Evaluation


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("\n    return x\n\n\ndef g():\n", "parsed"),
        ("\n    y = x +\n    return y\n    z", "broken"),
        ("\n    for y in x:\n        print(y", "unfinished"),
        ('\n    """Say', "unfinished"),
        ("\n    try:\n        y = 1\n    except E:\n        y = 2\n    return y\n", "parsed"),
        ("\n    try:\n        y = 1\n    return y\n    x", "broken"),
        ("\n    y = (1,\n  2)\n    return\n", "parsed"),
        ("\n      y = 1\n   z = 2\n    return", "broken"),
        (" return x", "unfinished"),
    ],
)
def test_verdicts(completion: str, expected: str) -> None:
    assert family_evaluation.verdict("def f(x):", completion) == expected
    indented = completion.replace("\n", "\n    ").replace("\n    def", "\ndef")
    assert family_evaluation.verdict("    def f(x):", indented) == expected


# What ships


def test_the_family_is_small_enough_to_ship() -> None:
    folder = Path(family.__file__).parent
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 60e6


def test_the_card_names_what_was_held_out() -> None:
    card = (family.path("pydoc") / "README.md").read_text()
    assert all(f"`{name}`" in card for name in stdlib_corpus.HELD_OUT)


def test_names_resolve_and_others_are_refused() -> None:
    assert all((family.path(name) / "config.json").is_file() for name in family.NAMES)
    with pytest.raises(KeyError, match="pydoc-draft"):
        family.path("gpt")


def test_the_family_is_found_without_torch() -> None:
    code = "import sys, paceline.family; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
