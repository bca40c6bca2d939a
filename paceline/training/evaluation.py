"""What the family can do: completions that parse, answers, and how often the draft foresees the target."""

import ast
import io
import time
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from paceline.training.corpus import held_out_files, read_source
from paceline.training.distil import write
from paceline.training.models import logits
from paceline.training.tokenizer import TURN_END

CONTEXT = 192
"""Tokens of a file before and within a function's header that a completion continues."""

COMPLETION = 60

CONTINUATIONS = frozenset({"elif", "else", "except", "finally"})
"""Words that begin a line but belong to the statement before it."""

QUESTIONS = (
    "What does json.dumps do?",
    "What does os.path.join do?",
    "What does len do?",
    "How do I call functools.reduce?",
    "What is asyncio.gather?",
    "Explain random.shuffle.",
)


def parse_counts(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, temperature: float) -> dict[str, int]:
    """How many completions of held-out function headers parse, are broken, or hold no whole statement yet."""
    headers = list(_function_headers(tokenizer))
    prompts = torch.tensor([ids for ids, _ in headers])
    written = torch.cat([write(model, part, COMPLETION, temperature, seed=6) for part in prompts.split(64)])
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
    except SyntaxError:
        return "broken"
    return "parsed" if source else "unfinished"


def _whole_statements(source: str, indent: int, first: int) -> str:
    """A function up to its last statement that has surely ended; empty if there is none.

    The header is indented by `indent`, the body begins at row `first`, counted from 1. A statement of the
    body has ended where a logical line begins at the same column or further left.
    """
    source = source[: source.rfind("\n") + 1]
    starts = [start for start in _logical_lines(source) if start[0] >= first]
    end = 0
    for row, column, word in starts[1:]:
        if column <= starts[0][1] and word not in CONTINUATIONS:
            end = row - 1
        if column <= indent:
            break
    return "".join(source.splitlines(keepends=True)[:end])


def _logical_lines(source: str) -> Iterator[tuple[int, int, str]]:
    """Row (from 1), column and first word of each logical line, as far as the text goes."""
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
                ids = tokenizer.encode("\n".join(lines[:last]), add_special_tokens=False)[-CONTEXT:]
                if len(ids) == CONTEXT:
                    yield ids, "\n".join(lines[first:last])


def _header_end(lines: Sequence[str], first: int) -> int:
    rows = range(first, len(lines))
    return 1 + next(row for row in rows if lines[row].partition("#")[0].rstrip().endswith(":"))


def answers(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    """The model's greedy answers to a few questions."""
    return {question: _answer(model, tokenizer, question) for question in QUESTIONS}


def _answer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, question: str) -> str:
    chat = [{"role": "user", "content": question}]
    prompt = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    text = tokenizer.decode(write(model, ids, 160, 0.0, seed=0)[0, ids.shape[1] :])
    return str(text).split(TURN_END)[0]


@torch.no_grad()
def agreement(draft: nn.Module, target: nn.Module, rows_RL: Tensor, first: int = 0) -> float:
    """How often draft and target hold the same next token most probable, from position `first` on; 0 to 1."""
    device = next(target.parameters()).device
    pairs = [(_choices(draft, rows, first), _choices(target, rows, first)) for rows in rows_RL.to(device).split(8)]
    return float(torch.cat([(mine == theirs).flatten() for mine, theirs in pairs]).float().mean())


def _choices(model: nn.Module, rows: Tensor, first: int) -> Tensor:
    return logits(model, rows)[:, first:].argmax(-1)


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
