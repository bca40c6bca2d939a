"""Evaluation of the family: completions that parse, answers, and how often the draft agrees with the target."""

import ast
import io
import random
import time
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from paceline_lab.training.family.family_models import logits
from paceline_lab.training.family.family_tokenizer import TURN_END
from paceline_lab.training.family.stdlib_corpus import held_out_files, read_source
from paceline_lab.training.family.target_text import write
from paceline_lab.training.family.token_corpus import Ids, windows

Passage = tuple[Tensor, int]
"""Ids int64 [rows, length], and the first position whose next token is evaluated."""

CONTEXT = 192
"""Tokens of a file before and within a function's header that a completion continues."""

COMPLETION = 60
FUNCTIONS = 96

CONTINUATIONS = frozenset({"elif", "else", "except", "finally"})
"""Keywords that begin a line of the previous statement."""

QUESTIONS = (
    "What does json.dumps do?",
    "What does os.path.join do?",
    "What does len do?",
    "How do I call functools.reduce?",
    "What is asyncio.gather?",
    "Explain random.shuffle.",
)


def measure(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, held_out: Sequence[Ids]
) -> dict[str, Any]:
    """All figures of the model cards that are computed from the models."""
    answered = greedy_responses(target, tokenizer)
    passages = _held_out_passages(held_out, target)
    passages["the target's greedy answers in its model card"] = answer_passages(tokenizer, answered)
    return {
        "target_parameters": target.num_parameters(),
        "draft_parameters": draft.num_parameters(),
        "target_step_ms": step_milliseconds(target),
        "draft_step_ms": step_milliseconds(draft),
        "parsing": {str(t): parse_counts(target, tokenizer, t) for t in (0.0, 0.8)},
        "answers": answered,
        "agreement": {text: agreement(draft, target, found) for text, found in passages.items()},
    }


def _held_out_passages(held_out: Sequence[Ids], target: LlamaForCausalLM) -> dict[str, list[Passage]]:
    def read(length: int, rows: int, first: int) -> list[Passage]:
        return [(part, first) for part in windows(held_out, length, seed=0)[:rows, :-1].split(4)]

    def written(temperature: float) -> list[Passage]:
        begun = windows(held_out, 64, seed=7)[:32, :-1]
        return [(part, 63) for part in write(target, begun, 128, temperature, seed=8).split(8)]

    return {
        "held-out sources, positions 0 to 511": read(512, 16, 0),
        "held-out sources, positions 1024 to 2047": read(2048, 4, 1024),
        "the target's greedy text after held-out sources": written(0.0),
        "the target's text at temperature 0.8 after held-out sources": written(0.8),
    }


def parse_counts(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, temperature: float) -> dict[str, int]:
    """Numbers of completions of held-out function headers that parse, are broken, or have no whole statement yet."""
    headers = random.Random(0).sample(list(_function_headers(tokenizer)), FUNCTIONS)
    prompts = torch.tensor([ids for ids, _ in headers])
    written = torch.cat([write(model, part, COMPLETION, temperature, seed=6) for part in prompts.split(48)])
    texts = tokenizer.batch_decode(written[:, CONTEXT:])
    verdicts = Counter(verdict(header, text) for (_, header), text in zip(headers, texts, strict=True))
    return {name: verdicts[name] for name in ("parsed", "broken", "unfinished")}


def verdict(header: str, completion: str) -> str:
    """`parsed`, `broken` or `unfinished`: a header and what follows, up to the last whole statement."""
    indent = len(header) - len(header.lstrip())
    header = ("if True:\n" if indent else "") + header
    try:
        source = _whole_statements(header + completion, indent, header.count("\n") + 2)
        ast.parse(source)
    except (SyntaxError, ValueError):
        return "broken"
    return "parsed" if source else "unfinished"


def _whole_statements(source: str, indent: int, first: int) -> str:
    """A function up to its last complete statement; empty if there is none.

    The header is indented by `indent`, the body begins at row `first`, counted from 1. A statement of the
    body has ended where a logical line begins at the same column or further left.
    """
    source = source[: source.rfind("\n") + 1]
    starts = [start for start in _logical_lines(source) if start[0] >= first]
    end = 0
    for row, column, keyword in starts[1:]:
        if column <= starts[0][1] and keyword not in CONTINUATIONS:
            end = row - 1
        if column <= indent:
            break
    return "".join(source.splitlines(keepends=True)[:end])


def _logical_lines(source: str) -> Iterator[tuple[int, int, str]]:
    """Row (from 1), column and first word of each logical line, as far as the text can be tokenized."""
    is_first = True
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.NEWLINE:
                is_first = True
            elif is_first and token.type in (tokenize.NAME, tokenize.OP, tokenize.STRING, tokenize.NUMBER):
                yield *token.start, token.string
                is_first = False
    except tokenize.TokenError:
        return  # the text stops inside brackets or a string


def _function_headers(tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[list[int], str]]:
    """For each held-out function: CONTEXT ids that end with its header, and the header's text."""
    for path in held_out_files():
        lines = read_source(path).splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.FunctionDef) and node.body[0].lineno > node.lineno:
                first = node.lineno - 1
                last = _header_end(lines, first)
                before = "\n".join(lines[:last][-CONTEXT:])
                ids = tokenizer.encode(before, add_special_tokens=False)[-CONTEXT:]
                if len(ids) == CONTEXT:
                    yield ids, "\n".join(lines[first:last])


def _header_end(lines: Sequence[str], first: int) -> int:
    rows = range(first, len(lines))
    return 1 + next(row for row in rows if lines[row].partition("#")[0].rstrip().endswith(":"))


def greedy_responses(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    """The model's greedy answers to a few questions."""
    return {question: _answer(model, tokenizer, question) for question in QUESTIONS}


def answer_passages(tokenizer: PreTrainedTokenizerFast, answered: Mapping[str, str]) -> list[Passage]:
    """The answers after their questions; evaluation begins with the answer."""
    pairs = [(_prompt(tokenizer, question), answer) for question, answer in answered.items()]
    return [
        (_encoded(tokenizer, prompt + answer), _encoded(tokenizer, prompt).shape[1] - 1) for prompt, answer in pairs
    ]


def _answer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, question: str) -> str:
    ids = _encoded(tokenizer, _prompt(tokenizer, question))
    text = tokenizer.decode(write(model, ids, 160, 0.0, seed=0)[0, ids.shape[1] :])
    return str(text).split(TURN_END)[0]


def _prompt(tokenizer: PreTrainedTokenizerFast, question: str) -> str:
    chat = [{"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))


def _encoded(tokenizer: PreTrainedTokenizerFast, text: str) -> Tensor:
    return torch.tensor([tokenizer.encode(text, add_special_tokens=False)])


def agreement(draft: nn.Module, target: nn.Module, passages: Iterable[Passage]) -> float:
    """Share of positions with the same most probable next token in draft and target, 0 to 1."""
    equal = [_choices(draft, *passage) == _choices(target, *passage) for passage in passages]
    return float(torch.cat([part.flatten() for part in equal]).float().mean())


@torch.no_grad()
def _choices(model: nn.Module, rows: Tensor, first: int) -> Tensor:
    return logits(model, rows.to(next(model.parameters()).device))[:, first:].argmax(-1)


def stored_parameters(folder: Path) -> int:
    """Number of parameters in a folder's safetensors files."""
    return sum(tensor.numel() for path in folder.glob("*.safetensors") for tensor in load_file(path).values())


@torch.no_grad()
def step_milliseconds(model: LlamaForCausalLM, context: int = 256, repeats: int = 30) -> float:
    """Median time to decode one token after `context` tokens, in milliseconds."""
    cache = model(input_ids=torch.zeros(1, context, dtype=torch.int64, device=model.device)).past_key_values
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    return median(_timed_step(model, token, cache) for _ in range(repeats)) * 1000


def _timed_step(model: LlamaForCausalLM, token: Tensor, cache: object) -> float:
    started = time.perf_counter()
    float(model(input_ids=token, past_key_values=cache).logits[0, -1, 0])
    return time.perf_counter() - started
