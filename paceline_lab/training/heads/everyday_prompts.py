"""Chats without answers: everyday questions, and tasks over free texts.

The texts are this repository's documentation and the standard library's docstrings; topics and templates are written
here. A seed draws the prompts, so the same seed gives the same ones with the same documentation and library.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from paceline_lab.training.family.docstring_chats import Chat
from paceline_lab.training.family.docstrings import DocumentedName, documented

TOPICS = (
    "photosynthesis", "the water cycle", "gravity", "black holes", "the moon landing", "volcanoes", "earthquakes",
    "climate change", "recycling", "solar panels", "wind power", "electric cars", "bicycles", "trains", "air travel",
    "the Roman Empire", "ancient Egypt", "the Industrial Revolution", "the French Revolution", "the Silk Road",
    "the printing press", "the Renaissance", "World War II", "the Great Wall of China", "the Vikings", "democracy",
    "inflation", "the stock market", "saving money", "a household budget", "taxes", "supply and demand", "insurance",
    "healthy eating", "vitamins", "sleep", "stress", "meditation", "yoga", "running", "swimming", "strength training",
    "the human heart", "the immune system", "vaccines", "the brain", "memory", "learning a language",
    "reading habits", "public speaking", "job interviews", "remote work", "time management", "teamwork", "leadership",
    "small businesses", "marketing", "customer service", "online privacy", "passwords", "computer viruses",
    "artificial intelligence", "machine learning", "neural networks", "databases", "the Internet", "web browsers",
    "operating systems", "programming", "Python", "open-source software", "version control", "algorithms", "sorting",
    "recursion", "prime numbers", "fractions", "percentages", "probability", "statistics", "geometry", "algebra",
    "calculus", "baking bread", "pasta", "soup", "chocolate", "coffee", "tea", "cheese", "spices",
    "vegetable gardens", "houseplants", "composting", "bees", "butterflies", "dogs", "cats", "horses", "whales",
    "penguins", "dinosaurs", "coral reefs", "rainforests", "deserts", "rivers", "mountains", "the oceans",
    "the seasons", "weather forecasts", "clouds", "the solar system", "Mars", "stars", "telescopes", "light", "sound",
    "magnets", "electricity", "batteries", "atoms", "chemical reactions", "metals", "plastics", "evolution", "DNA",
    "cells", "bacteria", "trees", "mushrooms", "painting", "photography", "music theory", "the guitar", "the piano",
    "jazz", "opera", "film making", "theatre", "poetry", "novels", "science fiction", "fairy tales", "mythology",
    "Shakespeare", "chess", "football", "basketball", "tennis", "hiking", "camping", "travel on a budget", "Japan",
    "France", "Brazil", "India", "Kenya", "Canada", "architecture", "bridges", "cities", "public transport",
    "housing", "museums", "libraries", "schools", "teachers", "friendship", "parenting", "birthdays", "holidays",
    "gifts", "cleaning", "home repairs", "sewing", "woodworking",
)  # fmt: skip
"""What everyday questions are about."""

QUESTIONS = (
    "What is {topic}?",
    "What should I know about {topic}?",
    "Explain {topic} in simple terms.",
    "Explain {topic} to a child.",
    "Give me five tips about {topic}.",
    "List three interesting facts about {topic}.",
    "Why is {topic} important?",
    "What are the advantages and disadvantages of {topic}?",
    "Write a short story about {topic}.",
    "Write a poem about {topic}.",
    "Write an introduction to an essay about {topic}.",
    "Write an email to a colleague about {topic}.",
    "Write a short dialogue about {topic}.",
    "How did {topic} change over time?",
    "How does a beginner get started with {topic}?",
    "What are common mistakes people make with {topic}?",
    "Suggest a title and an outline for an article about {topic}.",
    "Describe {topic} in one paragraph.",
    "What questions do people often ask about {topic}?",
    "Make a step-by-step plan for learning about {topic}.",
    "Compare {topic} and {other}.",
    "How is {topic} related to {other}?",
    "Give an example of {topic} from daily life.",
    "Summarize the history of {topic}.",
)
TEXT_TASKS = (
    "Summarize this text in two sentences:\n\n{text}",
    "Summarize the following text:\n\n{text}",
    "Rewrite this text in simpler words:\n\n{text}",
    "Rewrite this text so that it is more formal:\n\n{text}",
    "Explain what this means:\n\n{text}",
    "List the main points of this text:\n\n{text}",
    "What is this text about?\n\n{text}",
    "Write three questions about this text, with answers:\n\n{text}",
    "{text}\n\nWhat does this mean for a beginner?",
    "Turn this into a list of steps:\n\n{text}",
    "Correct the grammar of this text:\n\n{text}",
)
CODE_TASKS = (
    "Write a Python function that {task}.",
    "How do I write a Python program that {task}?",
    "Write Python code that {task}, and explain it.",
    "Show an example in Python that {task}.",
)
CODE_JOBS = (
    "reverses a string", "counts the words of a text", "reads a CSV file", "sorts a list of dictionaries by a key",
    "finds the largest number of a list", "checks whether a number is prime", "computes a factorial",
    "merges two lists", "computes the Fibonacci numbers", "removes duplicates from a list",
    "checks whether a word is a palindrome", "converts Celsius to Fahrenheit", "computes the average of a list",
    "draws a random number", "writes a JSON file", "downloads a web page", "parses a date",
    "measures the time of a function", "splits a text into sentences", "computes the area of a circle",
    "multiplies two matrices", "counts the vowels of a string", "flattens a nested list", "searches a sorted list",
    "implements a stack", "implements a queue", "implements bubble sort", "implements a simple calculator",
    "finds common items of two lists", "renames all files of a folder", "generates a password",
    "validates an email address", "plays rock, paper, scissors", "prints a multiplication table",
)  # fmt: skip
LIBRARY_QUESTIONS = ("What does `{name}` do in Python?", "How do I use `{name}` in Python?", "Explain `{name}`.")

SHORTEST_TEXT, LONGEST_TEXT = 120, 900
"""Of a paragraph for a task, in characters."""


def everyday_prompts(count: int, seed: int) -> list[Chat]:
    """`count` chats of one question each, no two of them equal. More chats of a seed begin with fewer of it."""
    rng = random.Random(seed)
    makers = _makers(rng)
    found: dict[str, None] = {}
    while len(found) < count:
        (make,) = rng.choices([each for each, _ in makers], [weight for _, weight in makers])
        found[make()] = None
    return [[{"role": "user", "content": content}] for content in found]


@cache
def free_paragraphs() -> Sequence[str]:
    """Paragraphs of this repository's documentation and of the standard library's docstrings, in a fixed order."""
    pages = sorted((Path(__file__).parents[3] / "docs").glob("*.md"))
    parts = [part.strip() for page in pages for part in re.split(r"\n\s*\n", page.read_text(encoding="utf-8"))]
    prose = [part for part in parts if part[:1].isalpha()]
    return _fitting([*prose, *(entry.summary for entry in _documented())])


@cache
def _documented() -> Sequence[DocumentedName]:
    return documented()


def _fitting(paragraphs: Sequence[str]) -> list[str]:
    joined = (" ".join(each.split()) for each in paragraphs)
    return [each for each in dict.fromkeys(joined) if SHORTEST_TEXT <= len(each) <= LONGEST_TEXT]


def _makers(rng: random.Random) -> list[tuple[Callable[[], str], float]]:
    """Functions that draw a question of each kind, and the weight of the kind."""
    paragraphs = free_paragraphs()
    names = [entry.name for entry in _documented() if not entry.is_method]

    def about_a_topic() -> str:
        topic, other = rng.sample(TOPICS, 2)
        return rng.choice(QUESTIONS).format(topic=topic, other=other)

    def about_a_text() -> str:
        return rng.choice(TEXT_TASKS).format(text=rng.choice(paragraphs))

    def for_code() -> str:
        return rng.choice(CODE_TASKS).format(task=rng.choice(CODE_JOBS))

    def about_the_library() -> str:
        return rng.choice(LIBRARY_QUESTIONS).format(name=rng.choice(names))

    return [(about_a_topic, 0.55), (about_a_text, 0.25), (for_code, 0.05), (about_the_library, 0.15)]
