"""Structural tags as grammars in Lark."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.grammar import GrammarError
from paceline.grammar.lark import json_part, regex_part, text_part
from paceline.grammar.special_tokens import SpecialTokens, TextOrToken, lark_parts, merged
from paceline.text import Tokenizer
from paceline_services.gateway.structural_tag import (
    AnyTextFormat,
    ConstStringFormat,
    Format,
    JsonSchemaFormat,
    OrFormat,
    RegexFormat,
    SequenceFormat,
    TagFormat,
    TriggeredTagsFormat,
)

ANY_TEXT = "/(?s:.*)/"
Parts = Sequence[TextOrToken]


def grammar_from_format(tag: Format, tokenizer: Tokenizer) -> str:
    """The text that a structural tag describes. Raises `GrammarError`."""
    rules = _Rules(SpecialTokens(tokenizer))
    start = rules.rule(tag, [])
    return "\n".join([f"start: {start}", "TEXT: /(?s:.+)/", *rules.lines])


class _Rules:
    """The rules of one grammar.

    A rule is made with `ends`: the texts of which one has to follow, each as its parts, and which the rule includes.
    Text without an end of its own stops at the first of them. No `ends`: nothing has to follow.
    """

    def __init__(self, special: SpecialTokens) -> None:
        self.lines: list[str] = []
        self._special = special

    def rule(self, tag: Format, ends: Sequence[Parts]) -> str:
        """The name of a new rule."""
        match tag:
            case ConstStringFormat():
                return self._add(self._then(self._text(tag.value), ends))
            case JsonSchemaFormat():
                return self._add(self._then(json_part(tag.json_schema), ends))
            case RegexFormat():
                return self._add(self._then(regex_part(tag.pattern), ends))
            case AnyTextFormat():
                return self._add(self._free_text(ends))
            case SequenceFormat():
                return self._sequence(tag, ends)
            case OrFormat():
                return self._add(" | ".join([self.rule(each, ends) for each in tag.elements]))
            case TagFormat():
                return self._add(self._then(self._tag(tag, tag.begin), ends))
            case TriggeredTagsFormat():
                return self._triggered(tag, ends)

    def _sequence(self, tag: SequenceFormat, ends: Sequence[Parts]) -> str:
        *first, last = tag.elements
        if not all(map(_has_end, first)):
            raise GrammarError("any_text and triggered_tags can only be the last element of a sequence")
        return self._add(" ".join([*(self.rule(each, []) for each in first), self.rule(last, ends)]))

    def _tag(self, tag: TagFormat, begin: str) -> str:
        """The rest of a tag from this rest of its begin on."""
        ends = [self._special.split(end) for end in tag.ends]
        return f"{self._text(begin)} {self.rule(tag.content, ends)}"

    def _triggered(self, tag: TriggeredTagsFormat, ends: Sequence[Parts]) -> str:
        """Text up to a trigger, and a tag's rest, any number of times; then text without a trigger."""
        called = self._add(" | ".join(self._after_trigger(tag, trigger) for trigger in tag.triggers))
        rest = self._free_text(ends)
        if tag.stop_after_first:
            rest = f"{self._then(called, ends)} | {rest}"
        if not tag.at_least_one:
            return self._add(rest if tag.stop_after_first else f"{called}* {rest}")
        first = self._add(" | ".join(self._tag(each, each.begin) for each in tag.tags))
        return self._add(self._then(first, ends) if tag.stop_after_first else f"{first} {called}* {rest}")

    def _after_trigger(self, tag: TriggeredTagsFormat, trigger: str) -> str:
        """Text up to this trigger, and the rest of one of its tags."""
        begun = [each for each in tag.tags if _trigger_of(each, tag.triggers) == trigger]
        if not begun:
            raise GrammarError(f"no tag begins with the trigger {trigger!r}")
        parts = self._special.split(trigger)
        for each in begun:
            rest = self._special.split(each.begin.removeprefix(trigger))
            if merged([*parts, *rest]) != self._special.split(each.begin):
                raise GrammarError(f"the trigger {trigger!r} ends inside a special token of {each.begin!r}")
        tags = self._add(" | ".join(self._tag(each, each.begin.removeprefix(trigger)) for each in begun))
        return f"{self._up_to(parts)} {tags}"

    def _free_text(self, ends: Sequence[Parts]) -> str:
        """Any text, without `ends` to the end of the output."""
        return self._add(" | ".join(map(self._up_to, ends))) if ends else "TEXT?"

    def _up_to(self, end: Parts) -> str:
        """Any text before the first occurrence of this end, and the end."""
        match end:
            case []:
                raise GrammarError("the end of a tag with free text in it cannot be empty")
            case [str(text)]:
                return self._add(f"{ANY_TEXT} {text_part(text)}", "[lazy]")
            case [str(text), *rest]:  # a special token is no text, so the first one of its kind follows the text
                before = f"BEFORE_{len(self.lines)}"
                self.lines.append(f"{before}: {ANY_TEXT} {text_part(text)}")
                return f"{before} {lark_parts(rest)}"
            case _:
                return f"TEXT? {lark_parts(end)}"

    def _then(self, part: str, ends: Sequence[Parts]) -> str:
        """This part and one of the ends."""
        return f"{part} {self._add(' | '.join(map(lark_parts, ends)))}" if ends else part

    def _text(self, text: str) -> str:
        return lark_parts(self._special.split(text))

    def _add(self, body: str, options: str = "") -> str:
        """The name of a new rule with this body."""
        name = f"rule_{len(self.lines)}"
        self.lines.append(f"{name}{options}: {body}")
        return name


def _has_end(tag: Format) -> bool:
    """Whether it is known without the following text where a text of this format ends."""
    match tag:
        case AnyTextFormat() | TriggeredTagsFormat():
            return False
        case SequenceFormat():
            return _has_end(tag.elements[-1])
        case OrFormat():
            return all(map(_has_end, tag.elements))
        case _:
            return True


def _trigger_of(tag: TagFormat, triggers: Sequence[str]) -> str:
    """The one trigger with which a tag begins. Raises `GrammarError`."""
    found = [trigger for trigger in triggers if tag.begin.startswith(trigger)]
    if len(found) != 1:
        raise GrammarError(f"{len(found)} triggers fit the tag that begins with {tag.begin!r}, and one has to")
    return found[0]
