"""Grammars that make a model call tools, in the way that its family writes calls; and where any grammar begins, for a
model that may reason before it answers."""

from __future__ import annotations

import json
from collections.abc import Collection

from paceline.grammar.json_schema import GrammarError
from paceline.grammar.lark import json_part
from paceline.grammar.lark_rules import LarkRules, SpecialTokens, lark_parts, merged
from paceline.grammar.reasoning_matcher import ALWAYS, ReasoningGate
from paceline.parsing.output_format import OutputFormat
from paceline.parsing.reasoning import ReasoningFormat
from paceline.parsing.tool_format import JsonSchema, ToolFormat, Tools
from paceline.text import Tokenizer

SPACE = r"/[ \t\r\n]{0,8}/"
"""As models write it behind their reasoning. It is bounded: small models may never end it."""


def forced_call_grammar(
    tool_format: ToolFormat,
    tools: Tools,
    tokenizer: Tokenizer,
    *,
    parallel: bool,
    reasoning: ReasoningFormat | None = None,
    relaxed: Collection[str] = (),
) -> str:
    """Lark text: nothing but a call of one of these tools, or of any number of them if `parallel`.

    `tools`: the arguments are an object, whatever the schema says. A little white space may come before the first call.
    `relaxed`: tools of whose schemas is left out what cannot be compiled. `reasoning`: of the model. If the format of
    its calls has the reasoning in it, so has the grammar; otherwise the grammar begins behind it, see `grammar_start`.
    Raises `GrammarError`.
    """
    if not tools:
        raise GrammarError("there is no tool that could be called")
    special, rules = SpecialTokens(tokenizer), LarkRules()

    def written(text: str) -> str:
        return lark_parts(special.split(text))

    before = written(tool_format.opening.lstrip())
    if reasoning is not None and tool_format.reads_reasoning:
        thought = f"{written(reasoning.begin)} {rules.text_up_to(special.split(reasoning.end))}"
        before = f"({thought} {before})*"
    call = rules.one_of(
        [
            rules.add(_call(tool_format, name, schema, special, strict=name not in relaxed), comment=name)
            for name, schema in tools.items()
        ]
    )
    more = f"({written(tool_format.separator)} {call})*" if parallel else ""
    return rules.grammar(f"{SPACE} {before} {call} {more} {written(tool_format.closing)}")


def _call(tool_format: ToolFormat, name: str, schema: JsonSchema, special: SpecialTokens, *, strict: bool) -> str:
    if json.dumps(name, ensure_ascii=False) != f'"{name}"':
        raise GrammarError(f"the tool name {name!r} has a quotation mark, a backslash or a control character")
    before, between, behind = map(special.split, tool_format.call)
    head = merged([*before, name, *between])
    try:
        arguments = json_part({"type": "object", **schema}, strict=strict)
    except GrammarError as error:
        raise GrammarError(f"{name}: {error}") from None
    return f"{lark_parts(head)} {arguments} {lark_parts(behind)}"


def grammar_start(
    form: OutputFormat, prompt: str, tokenizer: Tokenizer, *, calls: bool, continued: str = ""
) -> ReasoningGate:
    """Where the grammar of an answer to this rendered prompt begins.

    `calls`: the grammar forces calls, see `forced_call_grammar`. `continued`: the text that the answer continues, if
    there is one; it has all reasoning that is to come, or its beginning. Where the prompt leaves it open, the first
    token of the answer decides. A marker that may be written in several ways cannot be waited for: then the grammar
    begins at once.
    """
    reasoning = form.reasoning
    if reasoning is None or (calls and form.tools is not None and form.tools.reads_reasoning):
        return ALWAYS
    inside = form.begins_inside(prompt, continued)
    settled = bool(continued) or prompt.rstrip().endswith(reasoning.end)
    closing = _fixed_tokens(reasoning.answer or reasoning.end, tokenizer)
    if closing and (inside or (reasoning.answer and not settled)):
        return ReasoningGate(closing)
    opening = tokenizer.token_id(reasoning.begin)
    return ALWAYS if not closing or opening is None or settled else ReasoningGate(closing, opening)


def _fixed_tokens(marker: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens of a marker that models write in one way only: one token, or some between special tokens.

    Empty: there may be several ways.
    """
    token = tokenizer.token_id(marker)
    if token is not None:
        return (token,)
    tokens = tuple(tokenizer.encode(marker, add_special_tokens=False))
    delimited = len(tokens) > 1 and {tokens[0], tokens[-1]} <= tokenizer.special_ids
    return tokens if delimited else ()
