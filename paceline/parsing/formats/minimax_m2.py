"""MiniMax M2: `<minimax:tool_call>`, then `<invoke name="f">` with `<parameter name="a">1</parameter>` in it."""

from __future__ import annotations

from paceline.parsing.invoke_calls import InvokeTags

TAGS = InvokeTags("<minimax:tool_call>")
MINIMAX_M2 = TAGS.tool_format(
    "minimax_m2", markers=(TAGS.section, TAGS.section_end), template_signs=("minimax:tool_call", "invoke name=")
)
