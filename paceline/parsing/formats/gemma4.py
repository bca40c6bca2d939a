"""Gemma 4: `<|tool_call>call:f{a:1,b:<|"|>x<|"|>}<tool_call|>`, any number of them.

The arguments are like JSON, with keys without quotes and a token for the quotes of texts. JSON is read, too.
"""

from __future__ import annotations

import re

from paceline.parsing.json_text import is_json, json_value
from paceline.parsing.tagged_arguments import quoted, text_value
from paceline.parsing.text_reader import NAME, Content, Steps, TextReader
from paceline.parsing.tool_format import ToolFormat, Tools

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
CALL = "call:"
QUOTE_ENDS = {QUOTE: (",", "}", "]", END)}
KEY = re.compile(r'[^:,{}\[\]<"]+')
WORD = re.compile(r"[^,{}\[\]<]+")


def parse(reader: TextReader, tools: Tools) -> Steps[None]:
    while (yield from reader.until((BEGIN,), Content)):
        name = (yield from reader.run(NAME)) if (yield from reader.skip(CALL)) else ""
        yield from reader.space()
        if name and (yield from reader.accept("{")):
            yield reader.call(name)
            yield from _arguments(reader)
            yield from reader.skip_closing(END)
        else:
            yield Content(reader.since_mark())


def _arguments(reader: TextReader) -> Steps[None]:
    """What is behind the "{", as JSON. Arguments that the end of the text cuts off stay open."""
    yield reader.arguments("{")
    brackets, before = ["{"], ""
    while brackets:
        sign = yield from reader.skip("}", "]", ",")
        if sign == ",":
            before = ", "
        elif sign:
            yield reader.arguments(sign)
            brackets.pop()
        else:
            if brackets[-1] == "{":
                if not (yield from _key(reader, before)):
                    return
                before = ""
            bracket = yield from reader.accept("{", "[")
            if bracket:
                yield reader.arguments(before + bracket)
                brackets.append(bracket)
            elif not (yield from _value(reader, before)):
                return
            before = ""


def _key(reader: TextReader, before: str) -> Steps[bool]:
    """A key with its ":". False: none comes next."""
    reader.mark()
    mark = yield from reader.accept(QUOTE)
    if (yield from reader.peek()) == '"':
        key = yield from json_value(reader)
    else:
        key = quoted((yield from reader.run(KEY)).strip())
    if mark:
        yield from reader.accept(QUOTE)
    found = key != '""' and bool((yield from reader.skip(":")))
    text = reader.since_mark()
    if found:
        yield reader.arguments(f"{before}{key}: ")
    elif (yield from reader.peek()):
        yield Content(text)
    elif key != '""':
        yield reader.arguments(before + key[:-1])
    return found


def _value(reader: TextReader, before: str) -> Steps[bool]:
    """A value without brackets. False: none comes next."""
    if (yield from reader.accept(QUOTE)):
        yield reader.arguments(before)
        return (yield from text_value(reader, QUOTE_ENDS)) != ""
    if (yield from reader.peek()) == '"':
        yield reader.arguments(before)
        yield from json_value(reader, reader.arguments)
        return True
    word = yield from reader.run(WORD)
    ended = bool((yield from reader.peek()))
    if word:
        text = word.strip()
        yield reader.arguments(before + (text if is_json(text) or not ended else quoted(text)))
    return word != "" and ended


GEMMA4 = ToolFormat(
    "gemma4", parse, markers=(BEGIN, END, QUOTE), template_signs=(BEGIN, CALL, QUOTE), call=(BEGIN + CALL, "", END)
)
