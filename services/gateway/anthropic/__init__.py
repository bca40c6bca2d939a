"""Anthropic's Messages API (https://docs.claude.com/en/api/messages), converted to and from chat completions."""
