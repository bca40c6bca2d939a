"""Structured output: OpenAI's `response_format` and vLLM's `structured_outputs`, as grammars."""

from __future__ import annotations

from asyncio import Future, create_task, get_running_loop, shield
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import from_json, to_json

from paceline.config.sampling_params import MAX_GRAMMAR_LENGTH
from paceline.grammar import (
    GrammarError,
    grammar_from_choices,
    grammar_from_regex,
    grammar_from_schema,
    grammar_from_text,
)
from paceline.grammar.grammar_checker import GrammarChecker
from paceline.grammar.lark import WHITE_SPACE
from paceline_services.gateway.api_errors import InvalidRequestError, OverloadedError

MAX_WAITING_GRAMMARS = 32
"""Grammars that wait to be checked; more are refused. One may take a second, while all others wait."""
MAX_CACHED_GRAMMARS = 256
"""Checked grammars that are remembered."""
UNHASHED_FIELDS: dict[str, set[str]] = {"json_schema": {"name", "description"}}
"""Fields that do not change the grammar, and may be of any length."""
ANY_OBJECT: dict[str, Any] = {"type": "object"}


class StructureBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


def _parsed(value: Any) -> Any:
    """A JSON text as its value. Raises ValueError, also for JSON that is nested too deep."""
    return from_json(value) if isinstance(value, str) else value


T = TypeVar("T")


def _within_limit(value: T) -> T:
    """Checks the length as JSON, which is quick: the grammar is never shorter."""
    if (length := len(to_json(value).decode())) > MAX_GRAMMAR_LENGTH:
        raise ValueError(f"{length} characters, {MAX_GRAMMAR_LENGTH} are the most")
    return value


Schema = Annotated[dict[str, Any] | bool, BeforeValidator(_parsed), AfterValidator(_within_limit)]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]


class JsonSchema(StructureBody):
    name: str | None = None
    description: str | None = None
    schema_: Schema = Field(ANY_OBJECT, alias="schema", validate_default=False)
    strict: Annotated[bool | None, Field(description="every schema is kept to")] = None


class ResponseFormat(StructureBody):
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
        """The field to name when the grammar cannot be compiled."""
        return "response_format.json_schema.schema"

    def to_grammar(self) -> str:
        """The grammar; "": any text. Raises `GrammarError`."""
        if self.json_schema is not None:
            return grammar_from_schema(self.json_schema.schema_)
        return grammar_from_schema(ANY_OBJECT) if self.type == "json_object" else ""


class StructuredOutputs(StructureBody):
    json_: Schema | None = Field(None, alias="json")
    regex: GrammarText | None = None
    choice: (
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1), AfterValidator(_within_limit)] | None
    ) = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: GrammarText | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        if len(self._given()) != 1:
            message = "structured_outputs needs one of json, regex, choice, grammar and json_object"
            raise InvalidRequestError(message, param="structured_outputs")
        return self

    @property
    def field(self) -> str:
        """The field to name when the grammar cannot be compiled."""
        return f"structured_outputs.{self._given()[0][0]}"

    def to_grammar(self) -> str:
        """The grammar. Raises `GrammarError`."""
        match self._given()[0]:
            case "json", schema:
                return grammar_from_schema(schema, self._white_space)
            case "json_object", _:
                return grammar_from_schema(ANY_OBJECT, self._white_space)
            case "regex", regex:
                return grammar_from_regex(regex)
            case "choice", choices:
                return grammar_from_choices(choices)
            case _, grammar:
                return grammar_from_text(grammar)

    def _given(self) -> list[tuple[str, Any]]:
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


class StructuredBody(Protocol):
    """The fields of a body that ask for structured output."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None


class GrammarChecks:
    """Checks grammars in other processes: a hostile grammar delays only requests that bring grammars, too."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._checker = GrammarChecker()
        self._tasks: OrderedDict[bytes, Future[str | InvalidRequestError]] = OrderedDict()

    async def grammar_of(self, body: StructuredBody) -> str:
        """The grammar that a body asks for; "": none. Raises `InvalidRequestError` or `OverloadedError`."""
        asked = [each for each in (body.response_format, body.structured_outputs) if each is not None]
        if len(asked) > 1:
            message = "response_format and structured_outputs cannot both say what the text must be"
            raise InvalidRequestError(message, param="structured_outputs")
        if not asked:
            return ""
        grammar = await shield(self._check_task(asked[0]))
        if isinstance(grammar, InvalidRequestError):
            # A new error each time: a raised one keeps its frames alive, and with them the request's body.
            raise InvalidRequestError(grammar.message, param=grammar.param)
        return grammar

    async def close(self) -> None:
        """Stop all checks."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        await self._checker.close()

    async def _check(self, asked: ResponseFormat | StructuredOutputs) -> str | InvalidRequestError:
        """The grammar, or the error in it."""
        try:
            if grammar := await get_running_loop().run_in_executor(self._thread, compile_grammar_text, asked):
                await self._checker.check(grammar)
        except GrammarError as error:
            return InvalidRequestError(f"{asked.field}: {error}", param=asked.field)
        return grammar

    def _check_task(self, asked: ResponseFormat | StructuredOutputs) -> Future[str | InvalidRequestError]:
        key = blake2b(asked.model_dump_json(exclude=UNHASHED_FIELDS).encode()).digest()
        if key not in self._tasks:
            waiting = sum(not each.done() for each in self._tasks.values())
            if waiting >= MAX_WAITING_GRAMMARS:
                raise OverloadedError(f"{waiting} grammars wait to be compiled; try again soon", reason="grammars")
            self._tasks[key] = create_task(self._check(asked))
            if len(self._tasks) > MAX_CACHED_GRAMMARS:
                self._tasks.popitem(last=False)
        self._tasks.move_to_end(key)
        return self._tasks[key]


def compile_grammar_text(asked: ResponseFormat | StructuredOutputs) -> str:
    """The grammar; takes up to a second. Raises `GrammarError`."""
    grammar = asked.to_grammar()
    if len(grammar) > MAX_GRAMMAR_LENGTH:
        raise GrammarError(f"{len(grammar)} characters as a grammar, {MAX_GRAMMAR_LENGTH} are the most")
    return grammar
