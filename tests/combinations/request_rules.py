"""Everything that a request can ask for, as one table of rules. Each rule writes fields of the HTTP body."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

from paceline.text import Tokenizer
from tests.helpers.tool_models import MARKERS

Json = dict[str, Any]
Api = Literal["completions", "chat"]

TOKENIZER = Tokenizer.load("pydoc")
CALL, _, THINK, ANSWER = range(len(TOKENIZER.pieces), len(TOKENIZER.pieces) + len(MARKERS))
"""Ids of the markers that the served model has besides the shipped tokens."""
EOS, BEGIN = 2, 1
FREQUENT = sorted(
    {
        token
        for text in (
            " the of a to self is in and or None",
            "return (self, name): ., = ''\n    ",
            "Return the value. If",
        )
        for token in TOKENIZER.encode(text, add_special_tokens=False)
    }
)
"""Tokens that most outputs have."""
COMPLETIONS = (
    "def read_lines(path):\n    ",
    "Return the number of",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        ",
    "for name in names:\n    print(name)\nfor name in names:\n    ",
    "import json\n\ndef load(path):\n    with open(path) as file:\n        return ",
)
TEXTS = ("e", "th", " the", "the ", "of ", "se", "(", "():", ". ", ", ", "json", '"', "self.", "name", " ", "\n")
"""What outputs often have, some of it across tokens."""
PHRASES = ("of the", "return self", "self.items", "json.dumps", "os.path", "(self,", "file, ", "The ", "the number of")
"""Several tokens each."""
QUESTIONS = ("What does json.dumps do?", "What does os.path.join do?", "def area(width, height):", "Explain a queue.")


@dataclass(frozen=True, slots=True)
class Rule:
    """`fields(draw, chat)`: fields of a body. `api`, `stream`: where the rule exists; None: everywhere.

    `binds`: it says what the text must be. With two such rules a request is refused.
    """

    fields: Callable[[Random, bool], Json]
    api: Api | None = None
    stream: bool | None = None
    binds: bool = False


@dataclass(frozen=True, slots=True)
class Combination:
    """One request. `body` says whether it streams; over gRPC every request does."""

    rules: tuple[str, ...]
    api: Api
    body: Json

    def with_body(self, **fields: Any) -> Combination:
        return replace(self, body=self.body | fields)


def _record(**properties: Json) -> Json:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMA = _record(name={"type": "string", "maxLength": 8}, size={"type": "integer", "minimum": 0, "maximum": 99})
LIST = {"type": "array", "items": SCHEMA, "maxItems": 3}
TOOLS: list[Json] = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop", "parameters": _record(), "strict": True}},
]
TAG: Json = {
    "type": "tag",
    "begin": "<name>",
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": ["</name>", "</>"],
}
FORMATS: list[Json] = [
    TAG,
    {"type": "triggered_tags", "triggers": ["<na"], "tags": [TAG], "at_least_one": True, "stop_after_first": True},
    {"type": "sequence", "elements": [{"type": "const_string", "value": "Name: "}, {"type": "any_text"}]},
    {"type": "or", "elements": [TAG, {"type": "regex", "pattern": "[a-z ]{5,20}"}]},
]
CALL_TAG: Json = {
    "type": "tag",
    "begin": '<tool_call>\n{"name": "weather", "arguments": ',
    "content": {"type": "json_schema", "json_schema": SCHEMA, "style": "json"},
    "end": "}\n</tool_call>",
}
CALLS: Json = {"type": "sequence", "elements": [{"type": "regex", "pattern": "[a-z ]{0,9}"}, CALL_TAG, CALL_TAG]}
OLDER_TAG: Json = {"structures": [{"begin": "<a", "schema": SCHEMA, "end": ">"}], "triggers": ["<"]}
STRUCTURES: dict[str, Sequence[Any]] = {
    "json": (SCHEMA, LIST, json.dumps(SCHEMA)),
    "regex": ("[a-f]{3}-[0-9]{4}", "(the|a|an) [a-z ]+", "[A-Z][a-z]+( [a-z]+)*\\."),
    "choice": (["left", "right"], ["Return", "Return the", "Return a list."]),
    "grammar": ('root ::= "(" root ")" | "x"', 'start: WORD (" " WORD)*\nWORD: /[a-z]+/'),
    "json_object": (True,),
    "structural_tag": [
        {"type": "structural_tag", **each} for each in (OLDER_TAG, *({"format": each} for each in FORMATS))
    ],
}
"""Values of each kind of `structured_outputs`."""
EARLIER: list[Json] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": "Hello.", "reasoning_content": "A greeting."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "A tool knows.",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"name": "x"}'}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": '{"size": 3}'},
]


def _ids(draw: Random, least: int, most: int) -> list[int]:
    return draw.sample(FREQUENT, draw.randint(least, most))


def _texts(draw: Random, most: int) -> list[str]:
    return draw.sample(TEXTS, draw.randint(1, most))


def _log_probs(draw: Random, chat: bool) -> Json:
    top = draw.randint(0, 5)
    return {"logprobs": True, "top_logprobs": top} if chat else {"logprobs": top}


def _structured(kind: str) -> Rule:
    return Rule(lambda draw, chat: {"structured_outputs": {kind: draw.choice(STRUCTURES[kind])}}, binds=True)


def _tools(choice: Any, **more: Any) -> Rule:
    return Rule(lambda draw, chat: {"tools": TOOLS, "tool_choice": choice, **more}, api="chat", binds=True)


def _response_format(kind: str, *values: Json) -> Rule:
    return Rule(lambda draw, chat: {"response_format": {"type": kind, **draw.choice(values)}}, binds=True)


def _continued(draw: Random, chat: bool) -> Json:
    begun = draw.choice(("It returns", "<think>\nThe function", "<think>\nIt reads.\n</think>\n\nIt"))
    turns = [{"role": "user", "content": draw.choice(QUESTIONS)}, {"role": "assistant", "content": begun}]
    return {"messages": turns, "add_generation_prompt": False, "continue_final_message": True}


RULES: dict[str, Rule] = {
    "temperature": Rule(lambda draw, chat: {"temperature": draw.choice((0.0, 0.3, 0.7, 1.3, 2.0))}),
    "top_k": Rule(lambda draw, chat: {"top_k": draw.choice((-1, 1, 2, 5, 40))}),
    "top_p": Rule(lambda draw, chat: {"top_p": draw.choice((0.1, 0.5, 0.9, 0.99))}),
    "min_p": Rule(lambda draw, chat: {"min_p": draw.choice((0.01, 0.1, 0.5))}),
    "repetition_penalty": Rule(lambda draw, chat: {"repetition_penalty": draw.choice((0.8, 1.1, 1.5, 3.0))}),
    "presence_penalty": Rule(lambda draw, chat: {"presence_penalty": draw.uniform(-2, 2)}),
    "frequency_penalty": Rule(lambda draw, chat: {"frequency_penalty": draw.uniform(-2, 2)}),
    "logit_bias": Rule(lambda draw, chat: {"logit_bias": {str(id_): draw.uniform(-9, 4) for id_ in _ids(draw, 1, 9)}}),
    "bad_words": Rule(lambda draw, chat: {"bad_words": [*draw.sample(TEXTS[:-2], 2), *draw.sample(PHRASES, 4)]}),
    "allowed_token_ids": Rule(lambda draw, chat: {"allowed_token_ids": [EOS, *_ids(draw, 5, len(FREQUENT))]}),
    "min_tokens": Rule(lambda draw, chat: {"min_tokens": draw.randint(0, 8), "logit_bias": {str(EOS): 15.0}}),
    "max_tokens": Rule(lambda draw, chat: {"max_tokens": draw.randint(0, 12)}),
    "max_completion_tokens": Rule(lambda draw, chat: {"max_completion_tokens": draw.randint(0, 12)}, api="chat"),
    "seed": Rule(lambda draw, chat: {"seed": draw.choice((-1, 0, 2**63 + 1, 2**64 - 1))}),
    "stop": Rule(lambda draw, chat: {"stop": _texts(draw, 3)}),
    "stop as one text": Rule(lambda draw, chat: {"stop": _texts(draw, 1)[0]}),
    "stop_token_ids": Rule(lambda draw, chat: {"stop_token_ids": _ids(draw, 1, 8)}),
    "ignore_eos": Rule(lambda draw, chat: {"ignore_eos": True, "logit_bias": {str(EOS): 5.0}}),
    "include_stop_str_in_output": Rule(
        lambda draw, chat: {
            "include_stop_str_in_output": True,
            "stop": _texts(draw, 3),
            "stop_token_ids": [FREQUENT[0]],
        }
    ),
    "skip_special_tokens": Rule(
        lambda draw, chat: {
            "skip_special_tokens": False,
            "spaces_between_special_tokens": True,
            "logit_bias": {str(BEGIN): 9.0, str(EOS): 6.0},
        }
    ),
    "logprobs": Rule(_log_probs),
    "logprob_token_ids": Rule(lambda draw, chat: {**_log_probs(draw, chat), "logprob_token_ids": _ids(draw, 1, 9)}),
    "return_tokens_as_token_ids": Rule(
        lambda draw, chat: {**_log_probs(draw, chat), "return_tokens_as_token_ids": True}
    ),
    "prompt_logprobs": Rule(lambda draw, chat: {"prompt_logprobs": draw.randint(0, 5)}, stream=False),
    "echo": Rule(lambda draw, chat: {"echo": True}, api="completions"),
    "echo with log-probabilities": Rule(
        lambda draw, chat: {"echo": True, "logprobs": draw.randint(0, 3)}, api="completions"
    ),
    "n": Rule(lambda draw, chat: {"n": draw.randint(2, 4)}),
    "best_of": Rule(lambda draw, chat: {"best_of": 3, "n": draw.randint(1, 2)}, "completions", False),
    "truncate_prompt_tokens": Rule(lambda draw, chat: {"truncate_prompt_tokens": draw.choice((-1, 1, 4, 9))}),
    "stream_interval": Rule(lambda draw, chat: {"stream_interval": draw.choice((1, 2, 5, 100))}, stream=True),
    "stream_options": Rule(
        lambda draw, chat: {"stream_options": {"include_usage": draw.random() < 0.5, "continuous_usage_stats": True}},
        stream=True,
    ),
    "return_accepted": Rule(lambda draw, chat: {"return_accepted": True, "return_tree": True}),
    "speculation_stats": Rule(lambda draw, chat: {"speculation_stats": True}),
    "speculative": Rule(
        lambda draw, chat: {
            "speculative": {"enabled": True, "num_speculative_tokens": draw.randint(1, 3), "max_tree_nodes": 4}
        }
    ),
    "cache_salt": Rule(lambda draw, chat: {"cache_salt": draw.choice(("a", "b"))}),
    "priority": Rule(lambda draw, chat: {"priority": draw.randint(-3, 3)}),
    "request_id": Rule(lambda draw, chat: {"request_id": f"r{draw.randint(0, 9)}"}),
    "prompt_cache_key": Rule(lambda draw, chat: {"prompt_cache_key": draw.choice(("a", "b"))}),
    "length_penalty": Rule(lambda draw, chat: {"length_penalty": 1.0}),
    "response_format text": _response_format("text", {}),
    "response_format json_object": _response_format("json_object", {}),
    "response_format json_schema": _response_format(
        "json_schema",
        *(
            {"json_schema": {"name": "x", "description": "y", "schema": each, "strict": True}}
            for each in (SCHEMA, LIST)
        ),
    ),
    "response_format structural_tag": _response_format("structural_tag", *({"format": each} for each in FORMATS)),
    "response_format older tags": _response_format("structural_tag", OLDER_TAG),
    **{f"structured_outputs {kind}": _structured(kind) for kind in STRUCTURES},
    "structured_outputs white space": Rule(
        lambda draw, chat: {
            "structured_outputs": {
                "json": LIST,
                **draw.choice(({"disable_any_whitespace": True}, {"whitespace_pattern": "[ ]{0,2}"})),
            }
        },
        binds=True,
    ),
    "prompt of token ids": Rule(
        lambda draw, chat: {"prompt": TOKENIZER.encode(draw.choice(COMPLETIONS))}, api="completions"
    ),
    "several prompts": Rule(lambda draw, chat: {"prompt": draw.sample(COMPLETIONS, 2)}, api="completions"),
    "add_special_tokens": Rule(lambda draw, chat: {"add_special_tokens": chat}),
    "messages": Rule(
        lambda draw, chat: {
            "messages": [*EARLIER[draw.choice((0, 3)) :], {"role": "user", "content": draw.choice(QUESTIONS)}]
        },
        api="chat",
    ),
    "add_generation_prompt": Rule(lambda draw, chat: {"add_generation_prompt": False}, api="chat"),
    "continue_final_message": Rule(_continued, api="chat"),
    "chat_template_kwargs": Rule(
        lambda draw, chat: {"chat_template_kwargs": {"enable_thinking": draw.random() < 0.5}}, api="chat"
    ),
    "tools": Rule(lambda draw, chat: {"tools": TOOLS, "tool_choice": draw.choice(("auto", "none"))}, api="chat"),
    "tools called by choice": Rule(
        lambda draw, chat: {"tools": TOOLS, "response_format": {"type": "structural_tag", "format": CALLS}},
        api="chat",
        binds=True,
    ),
    "tool_choice required": _tools("required"),
    "tool_choice of a function": _tools({"type": "function", "function": {"name": "weather"}}),
    "parallel_tool_calls": _tools("required", parallel_tool_calls=False),
    "a second call left out": Rule(
        lambda draw, chat: {
            "tools": TOOLS,
            "parallel_tool_calls": False,
            "response_format": {"type": "structural_tag", "format": CALLS},
            "max_tokens": 150,
        },
        api="chat",
        binds=True,
    ),
    "reasoning_effort": Rule(
        lambda draw, chat: {
            "reasoning_effort": draw.choice(("none", "low", "high")),
            "logit_bias": {str(THINK): 12.0, str(ANSWER): draw.uniform(0, 6)},
        },
        api="chat",
    ),
    "include_reasoning": Rule(
        lambda draw, chat: {"include_reasoning": False, "logit_bias": {str(THINK): 12.0, str(ANSWER): 3.0}}, api="chat"
    ),
    "modalities": Rule(lambda draw, chat: {"modalities": ["text"]}, api="chat"),
}
NOT_COMBINED = {
    "model": "there is one",
    "documents": "the served model's template has none: refused",
    "index": "of calls in gRPC's responses",
}
"""Fields without a rule, and why."""


def allowed(api: Api, *, stream: bool) -> list[str]:
    """The rules that such a request may have."""
    return [name for name, rule in RULES.items() if rule.api in (None, api) and rule.stream in (None, stream)]


def combined(names: Sequence[str], api: Api, draw: Random, *, stream: bool) -> Combination:
    """A request with these rules, the later ones over the earlier ones. It has a seed and returns its token ids."""
    chat = api == "chat"
    given: Json = {"prompt": draw.choice(COMPLETIONS)}
    if chat:
        given = {"messages": [{"role": "user", "content": draw.choice(QUESTIONS)}]}
    given |= {"seed": draw.getrandbits(63), "temperature": draw.choice((0.0, 0.5, 1.0)), "return_token_ids": True}
    given |= _log_probs(draw, chat) if draw.random() < 0.5 else {}
    for name in names:
        fields = RULES[name].fields(draw, chat)
        bias = {**given.get("logit_bias", {}), **fields.get("logit_bias", {})}
        given |= fields | ({"logit_bias": bias} if bias else {})
    if "max_completion_tokens" not in given:
        given.setdefault("max_tokens", max(given.get("min_tokens", 0), draw.randint(12, 40)))
    if stream:
        given |= {"stream": True, "stream_options": {"include_usage": True} | given.get("stream_options", {})}
    return Combination(tuple(names), api, given)


def each_alone(draw: Random) -> list[Combination]:
    """Every rule by itself, in every way in which it exists."""
    ways: list[tuple[Api, bool]] = [("completions", False), ("completions", True), ("chat", False), ("chat", True)]
    return [combined([name], api, draw, stream=stream) for api, stream in ways for name in allowed(api, stream=stream)]


def at_random(draw: Random, most: int = 6) -> Combination:
    """One to `most` rules, half of the requests streamed. Seldom two of them bind the text."""
    api: Api = draw.choice(("completions", "chat"))
    stream = draw.random() < 0.5
    names = draw.sample(allowed(api, stream=stream), draw.randint(1, most))
    second = [name for name in names if RULES[name].binds][1:] if draw.random() < 0.9 else []
    return combined([name for name in names if name not in second], api, draw, stream=stream)
