"""A conversation as the prompt that the model's chat template makes of it."""

from __future__ import annotations

from paceline.text import ChatTemplate, ChatTemplateError, Tokenizer
from paceline_services.gateway.api_errors import InvalidRequestError
from paceline_services.gateway.generation.bodies import ChatFields, ReasoningEffort, TokenizeChatBody, TokenizeTextBody
from paceline_services.gateway.generation.prompt_encoding import encode
from paceline_services.gateway.http.json_body import Json

RESERVED_VARIABLES = frozenset(
    ("messages", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize")
)
"""Not for `chat_template_kwargs`: arguments of transformers' `apply_chat_template` besides the template's variables."""
THINKING = ("enable_thinking", "thinking")
"""Variables that say whether the model thinks: of Qwen 3's template and GLM's; of DeepSeek V3.1's and Granite's."""


def render_chat(fields: ChatFields, tokenizer: Tokenizer) -> str:
    """The prompt. Raises `InvalidRequestError`."""
    template = tokenizer.template_for(tools=bool(fields.offered_tools))
    if template is None:
        raise InvalidRequestError("this model has no chat template; use completions", param="messages")
    variables = template_variables(fields, template)
    try:
        return template.render(
            [message.for_template(template) for message in fields.messages],
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            variables=variables,
        )
    except ChatTemplateError as error:
        raise InvalidRequestError(f"the chat template refused it: {error}", param="messages") from error


async def encode_body(body: TokenizeTextBody | TokenizeChatBody, tokenizer: Tokenizer) -> list[int]:
    """Token ids of what `/tokenize` is asked for. Raises `InvalidRequestError` or `OverloadedError`."""
    text = render_chat(body, tokenizer) if isinstance(body, TokenizeChatBody) else body.prompt
    return await encode(text, tokenizer, add_special_tokens=body.add_special_tokens)


def template_variables(fields: ChatFields, template: ChatTemplate) -> Json:
    """What the request says to the template besides its messages.

    Raises `InvalidRequestError` for what the template does not know: it would have no effect.
    """
    given = fields.chat_template_kwargs or {}
    if reserved := RESERVED_VARIABLES.intersection(given):
        param = f"chat_template_kwargs.{min(reserved)}"
        raise InvalidRequestError(f"{param}: is no variable that a request can set", param=param)
    variables = _effort(fields.reasoning_effort, template) | given
    if fields.documents:
        _check_known("documents", template)
        variables["documents"] = fields.documents
    if tools := fields.offered_tools:
        _check_known("tools", template)
        variables["tools"] = [tool.for_template() for tool in tools]
    return variables


def _effort(effort: ReasoningEffort | None, template: ChatTemplate) -> Json:
    """Some templates know levels of effort, some only whether the model thinks, under one name or another."""
    if effort is None:
        return {}
    variables = {"reasoning_effort": effort} | dict.fromkeys(THINKING, effort != "none")
    known = {name: value for name, value in variables.items() if name in template.variables}
    if not known:
        raise _unknown("reasoning_effort")
    return known


def _check_known(name: str, template: ChatTemplate) -> None:
    if name not in template.variables:
        raise _unknown(name)


def _unknown(name: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}: this model's chat template does not know it", param=name)
