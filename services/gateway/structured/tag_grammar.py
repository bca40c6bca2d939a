"""Structural tags as grammars in Lark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.grammar import GrammarError
from paceline.grammar.lark import json_part, regex_part
from paceline.grammar.lark_rules import LarkRules, SpecialTokens, TextOrToken, lark_parts, merged
from paceline.text import Tokenizer
from paceline_services.gateway.structured.structural_tag import (
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

Parts = Sequence[TextOrToken]


def grammar_from_format(tag: Format, tokenizer: Tokenizer) -> str:
    """The text that a structural tag describes. Raises `GrammarError`."""
    rules = LarkRules()
    return rules.grammar(_Translation(rules, SpecialTokens(tokenizer)).rule(tag, []))


@dataclass(frozen=True, slots=True)
class _Translation:
    """Writes formats as rules.

    A rule is made with `ends`: the texts of which one has to follow, each as its parts, and which the rule includes.
    Text without an end of its own stops at the first of them. No `ends`: nothing has to follow.
    """

    rules: LarkRules
    special: SpecialTokens

    def rule(self, tag: Format, ends: Sequence[Parts]) -> str:
        """The name of a new rule."""
        match tag:
            case ConstStringFormat():
                return self.rules.add(self._then(self._text(tag.value), ends))
            case JsonSchemaFormat():
                return self.rules.add(self._then(json_part(tag.json_schema), ends))
            case RegexFormat():
                return self.rules.add(self._then(regex_part(tag.pattern), ends))
            case AnyTextFormat():
                return self.rules.add(self._free_text(ends))
            case SequenceFormat():
                return self._sequence(tag, ends)
            case OrFormat():
                return self.rules.one_of([self.rule(each, ends) for each in tag.elements])
            case TagFormat():
                return self.rules.add(self._then(self._tag(tag, tag.begin), ends))
            case TriggeredTagsFormat():
                return self._triggered(tag, ends)

    def _sequence(self, tag: SequenceFormat, ends: Sequence[Parts]) -> str:
        *first, last = tag.elements
        if not all(map(_has_end, first)):
            raise GrammarError("any_text and triggered_tags can only be the last element of a sequence")
        return self.rules.add(" ".join([*(self.rule(each, []) for each in first), self.rule(last, ends)]))

    def _tag(self, tag: TagFormat, begin: str) -> str:
        """The rest of a tag from this rest of its begin on."""
        ends = [self.special.split(end) for end in tag.end]
        return f"{self._text(begin)} {self.rule(tag.content, ends)}"

    def _triggered(self, tag: TriggeredTagsFormat, ends: Sequence[Parts]) -> str:
        """Text up to a trigger, and a tag's rest, any number of times; then text without a trigger."""
        begun: dict[str, list[TagFormat]] = {trigger: [] for trigger in tag.triggers}
        for each in tag.tags:
            begun[_trigger_of(each, tag.triggers)].append(each)
        called = self.rules.one_of([self._after_trigger(*item) for item in begun.items()])
        rest = self._free_text(ends)
        if not tag.at_least_one:
            bodies = [self._then(called, ends), rest] if tag.stop_after_first else [f"{called}* {rest}"]
            return self.rules.one_of(bodies)
        first = self.rules.one_of([self._tag(each, each.begin) for each in tag.tags])
        return self.rules.add(self._then(first, ends) if tag.stop_after_first else f"{first} {called}* {rest}")

    def _after_trigger(self, trigger: str, tags: Sequence[TagFormat]) -> str:
        """Text up to this trigger, and the rest of one of its tags."""
        if not tags:
            raise GrammarError(f"no tag begins with the trigger {trigger!r}")
        parts = self.special.split(trigger)
        for each in tags:
            rest = self.special.split(each.begin.removeprefix(trigger))
            if merged([*parts, *rest]) != self.special.split(each.begin):
                raise GrammarError(f"the trigger {trigger!r} ends inside a special token of {each.begin!r}")
        rests = self.rules.one_of([self._tag(each, each.begin.removeprefix(trigger)) for each in tags])
        return f"{self.rules.text_up_to(parts)} {rests}"

    def _free_text(self, ends: Sequence[Parts]) -> str:
        """Any text, without `ends` to the end of the output."""
        return self.rules.one_of([*map(self.rules.text_up_to, ends)]) if ends else self.rules.free_text()

    def _then(self, part: str, ends: Sequence[Parts]) -> str:
        """This part and one of the ends."""
        return f"{part} {self.rules.one_of([*map(lark_parts, ends)])}" if ends else part

    def _text(self, text: str) -> str:
        return lark_parts(self.special.split(text))


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
