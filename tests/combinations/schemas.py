"""`make schemas`: 1,000 random JSON schemas, regular expressions and tools, each answered with speculation.

The stack is that of `make combinations`. Every output is validated by something else than the grammar that bound it:
jsonschema, Python's `re`, and for tools the calls that the gateway's parser read, by jsonschema again. An output that
`max_tokens` cuts is asked for again with room for more, which must go on where the first one ended. If it is cut even
then, it counts as `cut`, and has to be a prefix of a text that matches (`regex`'s partial match). What a schema binds
must not be cut. The last line is JSON. The exit code is 1 if any output is invalid, or any request refused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import regex
from jsonschema import Draft202012Validator, ValidationError

from tests.combinations.__main__ import AT_ONCE, served_model
from tests.combinations.api_answers import ApiClient, api_client
from tests.combinations.random_structures import random_record, random_regex, random_schema, random_tools
from tests.combinations.request_rules import ANSWER, COMPLETIONS, EOS, QUESTIONS, TOKENIZER, Combination, Json

SHORT = 200
"""Tokens of an output at first."""
LONG = {"completions": 1500, "chat": None}
"""Tokens of an output that was cut before. None: as many as the context of 2,048 holds, for tools are long prompts."""


class InvalidOutputError(Exception):
    """What the model wrote is not what the request asked for."""


@dataclass
class Validation:
    """What came of the outputs so far."""

    counts: Counter[str] = field(default_factory=Counter)
    invalid: list[str] = field(default_factory=list)


Check = Callable[[Json, bool], None]
"""Checks a choice; the flag says whether it was cut. Raises `InvalidOutputError`."""


def schema_request(draw: Random) -> tuple[Combination, Check]:
    schema = draw.choice((random_schema, random_record))(draw)
    if draw.random() < 0.5:
        kind = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    else:
        kind = {"structured_outputs": {"json": schema, "disable_any_whitespace": draw.random() < 0.5}}
    return _request(draw, "schemas", kind), lambda choice, cut: _check_json(_text(choice), schema)


def regex_request(draw: Random) -> tuple[Combination, Check]:
    pattern = random_regex(draw)

    def check(choice: Json, cut: bool) -> None:
        text = _text(choice)
        if not (regex.fullmatch(pattern, text, partial=True) if cut else re.fullmatch(pattern, text)):
            raise InvalidOutputError(f"{text!r} does not match {pattern!r}, {choice['finish_reason']}")

    return _request(draw, "regexes", {"structured_outputs": {"regex": pattern}}), check


def tools_request(draw: Random) -> tuple[Combination, Check]:
    tools = random_tools(draw)
    named = draw.choice(tools)["function"]["name"]
    choice = draw.choice(("required", {"type": "function", "function": {"name": named}}))
    fields = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": draw.random() < 0.5}
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}

    def check(answered: Json, cut: bool) -> None:
        calls = [call["function"] for call in answered["message"].get("tool_calls", [])]
        if not calls or answered["message"]["content"]:
            raise InvalidOutputError(f"no call, or text beside it: {answered['message']}")
        if (choice != "required" or not fields["parallel_tool_calls"]) and len(calls) > 1:
            raise InvalidOutputError(f"{len(calls)} calls instead of one")
        for call in calls:
            if call["name"] not in (schemas if choice == "required" else {named}):
                raise InvalidOutputError(f"{call['name']} is called")
            _check_json(call["arguments"], schemas[call["name"]])

    return _request(draw, "tools", fields, chat=True), check


KINDS = (schema_request, regex_request, tools_request)


async def validate(client: ApiClient, sent: Combination, check: Check, found: Validation) -> None:
    """Ask once, or twice if the first output is cut."""
    try:
        choice = await _answered(client, sent.with_body(max_tokens=SHORT))
        if choice["finish_reason"] == "length":
            first, choice = choice, await _answered(client, sent.with_body(max_tokens=LONG[sent.api]))
            if choice["token_ids"][: len(first["token_ids"])] != first["token_ids"]:
                raise InvalidOutputError("with room for more it begins otherwise")
        cut = choice["finish_reason"] == "length"
        found.counts.update(["outputs", *sent.rules, *(["cut"] if cut else [])])
        check(choice, cut)
    except InvalidOutputError as error:
        found.invalid.append(f"{error}\n{json.dumps(sent.body)}")


async def validate_all(client: ApiClient, outputs: int, seed: int) -> Validation:
    """A third of the outputs of each kind."""
    found, draw, number = Validation(), Random(seed), count()

    async def work() -> None:
        while (index := next(number)) < outputs:
            await validate(client, *KINDS[index % len(KINDS)](draw), found)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return found


def _request(draw: Random, kind: str, fields: Json, *, chat: bool | None = None) -> Combination:
    chat = draw.random() < 0.5 if chat is None else chat
    prompt: Json = {"prompt": draw.choice(COMPLETIONS)}
    if chat:  # the model may begin to reason, but is to end it soon
        prompt = {"messages": [{"role": "user", "content": draw.choice(QUESTIONS)}], "logit_bias": {str(ANSWER): 8.0}}
    sampling = {"temperature": draw.choice((0.0, 0.7, 1.0)), "seed": draw.getrandbits(63), "return_token_ids": True}
    return Combination((kind,), "chat" if chat else "completions", prompt | sampling | fields)


async def _answered(client: ApiClient, sent: Combination) -> Json:
    """The choice of an answer. Raises `InvalidOutputError` if the request is refused."""
    answer = await client.over_http(sent)
    if answer.refused:
        raise InvalidOutputError(f"refused: {answer.refused}")
    [choice] = answer.content["choices"]
    return dict(choice)


def _text(choice: Json) -> str:
    """What the grammar bound. Behind reasoning white space is left out of the content, but not out of the tokens."""
    if "text" in choice:
        return str(choice["text"])
    if "reasoning" not in choice["message"]:
        return str(choice["message"]["content"])
    tokens = choice["token_ids"]
    if ANSWER not in tokens:
        raise InvalidOutputError("the reasoning has no end")
    return TOKENIZER.decode([token for token in tokens[tokens.index(ANSWER) + 1 :] if token != EOS])


def _check_json(text: str, schema: Any) -> None:
    try:
        Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(json.loads(text))
    except (ValueError, ValidationError) as error:
        raise InvalidOutputError(f"{text!r}: {str(error).splitlines()[0]}") from None


async def _run(outputs: int, seed: int) -> tuple[Validation, int]:
    with served_model() as (url, address):
        async with api_client(url, address) as client:
            return await validate_all(client, outputs, seed), client.accepted


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.combinations.schemas", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--count", type=int, default=1000, help="outputs (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    found, accepted = asyncio.run(_run(options.count, options.seed))
    print(*found.invalid, sep="\n\n")
    counts = {name: found.counts[name] for name in ("outputs", "schemas", "regexes", "tools", "cut")}
    print(json.dumps(counts | {"accepted_tokens": accepted, "invalid": len(found.invalid)}))
    return int(bool(found.invalid))


if __name__ == "__main__":
    sys.exit(main())
