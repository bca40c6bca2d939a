"""What a client says the text must be: OpenAI's `response_format`, and vLLM's `structured_outputs`."""

from __future__ import annotations

from asyncio import Future, create_task, get_running_loop, shield
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import from_json, to_json

from paceline.config.sampling import LONGEST_GRAMMAR
from paceline.grammar import GrammarError, of_choices, of_grammar, of_regex, of_schema
from paceline.grammar.checker import Checker
from paceline.grammar.writing import WHITE_SPACE
from services.gateway.errors import InvalidRequestError, OverloadedError

MOST_WAITING = 32
"""Grammars that wait to be checked. One may take a second, in which all others wait."""
REMEMBERED = 256
"""Grammars that need not be checked again."""
UNIMPORTANT: dict[str, set[str]] = {"json_schema": {"name", "description"}}
"""What says nothing of a grammar, and may be of any length."""
ANY_OBJECT: dict[str, Any] = {"type": "object"}


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


def _parsed(value: Any) -> Any:
    """JSON inside of JSON has its parser's limits, too: ValueError if it is nested too deep."""
    return from_json(value) if isinstance(value, str) else value


T = TypeVar("T")


def _short(value: T) -> T:
    """As a grammar it has no fewer characters than as JSON, which is written in no time."""
    if (length := len(to_json(value).decode())) > LONGEST_GRAMMAR:
        raise ValueError(f"{length} characters, {LONGEST_GRAMMAR} are the most")
    return value


Schema = Annotated[dict[str, Any] | bool, BeforeValidator(_parsed), AfterValidator(_short)]
Text = Annotated[str, Field(min_length=1, max_length=LONGEST_GRAMMAR)]


class JsonSchema(Part):
    name: str | None = None
    description: str | None = None
    schema_: Schema = Field(ANY_OBJECT, alias="schema", validate_default=False)
    strict: Annotated[bool | None, Field(description="every schema is kept to")] = None


class ResponseFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _whole(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequestError(
                "response_format.json_schema is needed with type json_schema, and only then",
                param="response_format.json_schema",
            )
        return self

    @property
    def field(self) -> str:
        """What is to blame for a grammar that cannot be compiled."""
        return "response_format.json_schema.schema"

    def written(self) -> str:
        """As a grammar; empty: any text. May raise `GrammarError`."""
        if self.json_schema is not None:
            return of_schema(self.json_schema.schema_)
        return of_schema(ANY_OBJECT) if self.type == "json_object" else ""


class StructuredOutputs(Part):
    json_: Schema | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1), AfterValidator(_short)] | None = (
        None
    )
    grammar: Text | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: Text | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        if len(self._said()) != 1:
            message = "structured_outputs needs one of json, regex, choice, grammar and json_object"
            raise InvalidRequestError(message, param="structured_outputs")
        return self

    @property
    def field(self) -> str:
        """What is to blame for a grammar that cannot be compiled."""
        return f"structured_outputs.{self._said()[0][0]}"

    def written(self) -> str:
        """As a grammar. May raise `GrammarError`."""
        match self._said()[0]:
            case "json", schema:
                return of_schema(schema, self._white_space)
            case "json_object", _:
                return of_schema(ANY_OBJECT, self._white_space)
            case "regex", regex:
                return of_regex(regex)
            case "choice", choices:
                return of_choices(choices)
            case _, grammar:
                return of_grammar(grammar)

    def _said(self) -> list[tuple[str, Any]]:
        every = {
            "json": self.json_,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object or None,
        }
        return [(field, value) for field, value in every.items() if value is not None]

    @property
    def _white_space(self) -> str | None:
        return None if self.disable_any_whitespace else self.whitespace_pattern or WHITE_SPACE


class Structured(Protocol):
    """A body, as far as it says what the text must be."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None


class GrammarChecks:
    """Checks grammars in processes of their own, so that a hostile one costs little, and delays nobody but those that
    bring others, too."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._checker = Checker()
        self._checked: OrderedDict[bytes, Future[str | InvalidRequestError]] = OrderedDict()

    async def grammar_of(self, body: Structured) -> str:
        """The grammar that a body asks for, or none. Raises `InvalidRequestError` with its field, `OverloadedError`."""
        asked = [each for each in (body.response_format, body.structured_outputs) if each is not None]
        if len(asked) > 1:
            message = "response_format and structured_outputs cannot both say what the text must be"
            raise InvalidRequestError(message, param="structured_outputs")
        if not asked:
            return ""
        grammar = await shield(self._begun(asked[0]))
        if isinstance(grammar, InvalidRequestError):
            # A new one each time: what is raised keeps the frames it passed, and with them the body that was sent.
            raise InvalidRequestError(grammar.message, param=grammar.param)
        return grammar

    async def close(self) -> None:
        """Nobody waits any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        await self._checker.close()

    async def _check(self, asked: ResponseFormat | StructuredOutputs) -> str | InvalidRequestError:
        """The grammar, or what is wrong with it."""
        try:
            if grammar := await get_running_loop().run_in_executor(self._thread, written, asked):
                await self._checker.check(grammar)
        except GrammarError as error:
            return InvalidRequestError(f"{asked.field}: {error}", param=asked.field)
        return grammar

    def _begun(self, asked: ResponseFormat | StructuredOutputs) -> Future[str | InvalidRequestError]:
        key = blake2b(asked.model_dump_json(exclude=UNIMPORTANT).encode()).digest()
        if key not in self._checked:
            waiting = sum(not each.done() for each in self._checked.values())
            if waiting >= MOST_WAITING:
                raise OverloadedError(f"{waiting} grammars wait to be compiled; try again soon", reason="grammars")
            self._checked[key] = create_task(self._check(asked))
            if len(self._checked) > REMEMBERED:
                self._checked.popitem(last=False)
        self._checked.move_to_end(key)
        return self._checked[key]


def written(asked: ResponseFormat | StructuredOutputs) -> str:
    """The grammar. Raises `GrammarError`. May take a second."""
    grammar = asked.written()
    if len(grammar) > LONGEST_GRAMMAR:
        raise GrammarError(f"{len(grammar)} characters as a grammar, {LONGEST_GRAMMAR} are the most")
    return grammar
