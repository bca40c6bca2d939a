"""A grammar's vocabulary is made before an engine serves: it holds Python's lock, so others' streams would stop."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from paceline import family
from paceline.config import EngineConfig, SpeculativeConfig
from paceline.config.sampling_params import SamplingParams
from paceline.engine.draft_client import LocalDraftClient
from paceline.grammar import grammar_from_choices
from paceline.grammar.grammar_state import GrammarCompiler
from paceline.grammar.grammar_vocabulary import GrammarVocabulary
from paceline.ipc.pipe import Pipe
from paceline.text import Tokenizer, token_texts
from paceline_services.target.engine_process import build_engine
from tests.helpers.grammars import tokenizer
from tests.helpers.llamas import VOCABULARY
from tests.helpers.tool_models import save_tool_model

CONFIG = EngineConfig(slots=256, max_num_batched_rows=8)


def test_an_engine_has_its_vocabulary_when_it_is_built() -> None:
    own = SpeculativeConfig(method="draft_model", model="pydoc", draft_placement="target")
    with socket.socket() as end:
        engine = build_engine(Pipe(end), "pydoc", CONFIG, own)
    assert engine._grammars._vocabulary.made.done()
    drafting = engine._draft_client
    assert isinstance(drafting, LocalDraftClient)
    assert drafting._speculator.grammars is not None
    assert drafting._speculator.grammars._vocabulary is engine._grammars._vocabulary


def test_the_thread_that_decodes_never_makes_it() -> None:
    threads = []

    def texts() -> Tokenizer:
        threads.append(threading.current_thread())
        return tokenizer()

    grammars = GrammarCompiler(GrammarVocabulary(texts), VOCABULARY)
    for word in ("abc", "de"):
        state = grammars.start_request(SamplingParams(grammar=grammar_from_choices([word])), [])
        assert state is not None
        state.wait(30.0)
        assert state.allowed([]) is not None
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


@pytest.mark.parametrize("model", family.NAMES)
def test_texts_of_tokens_are_those_of_the_tokenizer_json(model: str) -> None:
    """They are read without the tokenizer."""
    loaded = Tokenizer.load(model)
    assert token_texts(model) == (loaded.pieces, loaded.special_ids)


def test_special_tokens_of_a_folder_are_special(tmp_path: Path) -> None:
    folder = save_tool_model(tmp_path, special=True)
    loaded = Tokenizer.load(folder)
    assert len(loaded.special_ids) > 2
    assert token_texts(folder) == (loaded.pieces, loaded.special_ids)
