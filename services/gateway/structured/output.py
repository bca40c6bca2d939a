"""Structured output: OpenAI's `response_format` and vLLM's `structured_outputs`, as grammars."""

from __future__ import annotations

from asyncio import Future, create_task, get_running_loop, shield
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

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
from paceline.text import Tokenizer
from paceline_services.gateway.api_errors import InvalidRequestError, OverloadedError
from paceline_services.gateway.http.json_body import Body
from paceline_services.gateway.structured.structural_tag import (
    ANY_OBJECT,
    GrammarSource,
    GrammarText,
    Schema,
    StructuralFields,
    StructuralTag,
    parsed,
    within_limit,
)
from paceline_services.gateway.structured.tag_grammar import grammar_from_format

MAX_WAITING_GRAMMARS = 32
"""Grammars that wait to be checked; more are refused. One may take a second, while all others wait."""
MAX_CACHED_GRAMMARS = 256
"""Checked grammars that are remembered."""
UNHASHED_FIELDS: dict[str, set[str]] = {"json_schema": {"name", "description"}}
"""Fields that do not change the grammar, and may be of any length."""


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: Schema = Field(ANY_OBJECT, alias="schema", validate_default=False)
    strict: Annotated[bool | None, Field(description="false: leave out what cannot be kept to, and say so")] = None


class ResponseFormat(StructuralFields):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _whole(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequestError(
                "response_format.json_schema is needed with type json_schema, and only then",
                param="response_format.json_schema",
            )
        if self.type == "structural_tag":
            self.structural_format()
        elif self.format or self.structures or self.triggers:
            raise ValueError("format, structures and triggers need type structural_tag")
        return self

    @property
    def field(self) -> str:
        if self.type == "structural_tag":
            return "response_format.structures" if self.format is None else "response_format.format"
        return "response_format.json_schema.schema"

    def identity(self) -> bytes:
        return self.model_dump_json(exclude=UNHASHED_FIELDS).encode()

    def to_grammar(self, tokenizer: Tokenizer) -> str:
        match self.type:
            case "json_schema":
                asked = self.json_schema or JsonSchema()
                return grammar_from_schema(asked.schema_, strict=asked.strict is not False)
            case "json_object":
                return grammar_from_schema(ANY_OBJECT)
            case "structural_tag":
                return grammar_from_format(self.structural_format(), tokenizer)
            case "text":
                return ""


class StructuredOutputs(Body):
    json_: Schema | None = Field(None, alias="json")
    regex: GrammarText | None = None
    choice: (
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1), AfterValidator(within_limit)] | None
    ) = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
    structural_tag: Annotated[StructuralTag, BeforeValidator(parsed)] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: GrammarText | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        if len(self._given()) != 1:
            message = "structured_outputs needs one of json, regex, choice, grammar, json_object and structural_tag"
            raise InvalidRequestError(message, param="structured_outputs")
        return self

    @property
    def field(self) -> str:
        return f"structured_outputs.{self._given()[0][0]}"

    def identity(self) -> bytes:
        return self.model_dump_json().encode()

    def to_grammar(self, tokenizer: Tokenizer) -> str:
        match self._given()[0]:
            case "json", schema:
                return grammar_from_schema(schema, self._white_space)
            case "json_object", _:
                return grammar_from_schema(ANY_OBJECT, self._white_space)
            case "regex", regex:
                return grammar_from_regex(regex)
            case "choice", choices:
                return grammar_from_choices(choices)
            case "structural_tag", tag:
                return grammar_from_format(tag.structural_format(), tokenizer)
            case _, grammar:
                return grammar_from_text(grammar)

    def _given(self) -> list[tuple[str, Any]]:
        every = {
            "json": self.json_,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object or None,
            "structural_tag": self.structural_tag,
        }
        return [(field, value) for field, value in every.items() if value is not None]

    @property
    def _white_space(self) -> str | None:
        return None if self.disable_any_whitespace else self.whitespace_pattern or WHITE_SPACE


class CheckedGrammar(NamedTuple):
    """`text` "": any text. `left_out`: the keywords to which schemas with `strict: false` are not kept."""

    text: str
    left_out: Sequence[str] = ()


ANY_TEXT = CheckedGrammar("")


class StructuredBody(Protocol):
    """The fields of a body that ask for structured output."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None


class GrammarChecks:
    """Checks grammars in other processes: a hostile grammar delays only requests that bring grammars, too."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._checker = GrammarChecker()
        self._tasks: OrderedDict[bytes, Future[CheckedGrammar | InvalidRequestError]] = OrderedDict()

    async def grammar_of(self, body: StructuredBody, tokenizer: Tokenizer) -> CheckedGrammar:
        """The grammar that a body asks for. `tokenizer`: of the model.

        Raises `InvalidRequestError` or `OverloadedError`.
        """
        asked = [each for each in (body.response_format, body.structured_outputs) if each is not None]
        if len(asked) > 1:
            message = "response_format and structured_outputs cannot both say what the text must be"
            raise InvalidRequestError(message, param="structured_outputs")
        return await self.checked(asked[0], tokenizer) if asked else ANY_TEXT

    async def checked(self, source: GrammarSource, tokenizer: Tokenizer) -> CheckedGrammar:
        """The grammar of this source. Raises `InvalidRequestError` or `OverloadedError`."""
        grammar = await shield(self._check_task(source, tokenizer))
        if isinstance(grammar, InvalidRequestError):
            # A new error each time: a raised one keeps its frames alive, and with them the request's body.
            raise InvalidRequestError(grammar.message, param=grammar.param)
        return grammar

    async def close(self) -> None:
        """Stop all checks."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        await self._checker.close()

    async def _check(self, source: GrammarSource, tokenizer: Tokenizer) -> CheckedGrammar | InvalidRequestError:
        """The grammar, or the error in it."""
        try:
            writing = get_running_loop().run_in_executor(self._thread, compile_grammar_text, source, tokenizer)
            grammar = await writing
            return CheckedGrammar(grammar, await self._checker.check(grammar)) if grammar else ANY_TEXT
        except GrammarError as error:
            return InvalidRequestError(f"{source.field}: {error}", param=source.field)

    def _check_task(self, source: GrammarSource, tokenizer: Tokenizer) -> Future[CheckedGrammar | InvalidRequestError]:
        key = blake2b(tokenizer.fingerprint.encode() + b" " + source.identity()).digest()
        if key not in self._tasks:
            waiting = sum(not each.done() for each in self._tasks.values())
            if waiting >= MAX_WAITING_GRAMMARS:
                raise OverloadedError(f"{waiting} grammars wait to be compiled; try again soon", reason="grammars")
            self._tasks[key] = create_task(self._check(source, tokenizer))
            if len(self._tasks) > MAX_CACHED_GRAMMARS:
                self._tasks.popitem(last=False)
        self._tasks.move_to_end(key)
        return self._tasks[key]


def compile_grammar_text(source: GrammarSource, tokenizer: Tokenizer) -> str:
    """The grammar; takes up to a second. Raises `GrammarError`."""
    grammar = source.to_grammar(tokenizer)
    if len(grammar) > MAX_GRAMMAR_LENGTH:
        raise GrammarError(f"{len(grammar)} characters as a grammar, {MAX_GRAMMAR_LENGTH} are the most")
    return grammar
