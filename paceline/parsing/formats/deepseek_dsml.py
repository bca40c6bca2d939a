"""DeepSeek V3.2 and newer: `<｜DSML｜invoke name="f">`, with `<｜DSML｜parameter name="a" string="false">1` in it.

The versions differ in the name of the element around all calls; V4.1 has spaces behind the token.
"""

from __future__ import annotations

from paceline.parsing.invoke_calls import InvokeTags

TOKEN = "｜DSML｜"

DEEPSEEK_V32 = InvokeTags(f"<{TOKEN}function_calls>", TOKEN).tool_format(
    "deepseek_v32", markers=(TOKEN,), template_signs=(TOKEN, "function_calls>")
)
DEEPSEEK_V41 = InvokeTags(f"<{TOKEN} calls>", f"{TOKEN} ").tool_format(
    "deepseek_v41", markers=(TOKEN,), template_signs=(TOKEN, " calls>")
)
DEEPSEEK_V4 = InvokeTags(f"<{TOKEN}tool_calls>", TOKEN).tool_format(
    "deepseek_v4", markers=(TOKEN,), template_signs=(TOKEN, "tool_calls>")
)
