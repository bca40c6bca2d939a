"""Rules for names: one file name and one class name for one thing, in the field's words."""

from __future__ import annotations

from tests.helpers import house


def test_no_file_name_stands_twice() -> None:
    assert house.repeated_file_names() == {}


def test_no_public_class_name_stands_twice() -> None:
    assert house.repeated_class_names() == {}


def test_names_use_the_words_of_the_glossary() -> None:
    assert house.denied_names() == []


def test_a_denied_word_is_found_wherever_it_stands_in_a_name() -> None:
    assert house.words("LaneOfHearsay") == ["lane", "of", "hearsay"]
    assert house.words("states_told") == ["states", "told"]
    assert house.words("KVCache") == ["kv", "cache"]
