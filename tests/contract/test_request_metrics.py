"""What a gateway's metrics say of the sizes of requests."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.openai_stack import counts, open_stack


async def test_sizes_are_counted_for_every_completion_and_choices_for_every_prompt() -> None:
    """Two prompts with three choices each, and one with one."""
    async with open_stack(counts) as stack:
        assert (await stack.complete(prompt=["a", "b"], n=3, max_tokens=5)).status_code == 200
        assert (await stack.complete(prompt="c", max_tokens=2)).status_code == 200
        families = text_string_to_metric_families(await stack.metrics())
    samples = {
        sample.name: sample.value for family in families for sample in family.samples if "le" not in sample.labels
    }
    counted = {
        name: (samples[f"vllm:{name}_count"], samples[f"vllm:{name}_sum"])
        for name in (
            "request_params_n",
            "request_max_num_generation_tokens",
            "request_params_max_tokens",
            "request_generation_tokens",
        )
    }
    assert counted == {
        "request_params_n": (3, 3 + 3 + 1),
        "request_max_num_generation_tokens": (3, 5 + 5 + 2),
        "request_params_max_tokens": (7, 6 * 5 + 2),
        "request_generation_tokens": (7, 6 * 5 + 2),
    }
    assert samples["vllm:request_prompt_tokens_sum"] == samples["vllm:prompt_tokens_total"]
    assert samples["vllm:request_time_per_output_token_seconds_count"] == 7
