"""What a target tells a draft of its limits."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import SpeculativeConfig
from tests.unit.engine.bare_request import bare_request


@pytest.mark.parametrize(("named", "sent"), [({"least_path_probability": 0.02}, 0.02), ({}, 0.0)])
def test_a_draft_hears_of_a_least_path_probability_that_the_target_s_user_names(
    named: dict[str, Any], sent: float
) -> None:
    """A target's default would hold for a draft, too, whose user wants every node."""
    request, config = bare_request([1, 2]), SpeculativeConfig(method="ngram", **named)
    config = SpeculativeConfig.model_validate_json(config.model_dump_json())  # as `serve` hands it to a target
    assert request.opening(config, 1).least_path_probability == sent
    assert request.limit(config, 1).least_path_probability == sent
