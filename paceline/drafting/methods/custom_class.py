"""Method `custom_class`: a speculator that the user writes, see docs/custom-speculator.md."""

from __future__ import annotations

import importlib

from paceline.drafting.method_registry import MethodInputs
from paceline.drafting.speculator import Speculator


def build(inputs: MethodInputs) -> Speculator:
    """Call the class or factory at the dotted path `speculator`, or else `model`, with both configurations.

    Raises ValueError if it cannot be imported, or does not make a `Speculator`.
    """
    path = inputs.config.speculator or inputs.model
    module, _, name = path.rpartition(".")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"speculator {path!r} cannot be imported: {error}") from error
    speculator = factory(inputs.config, inputs.engine)
    if not isinstance(speculator, Speculator):
        raise ValueError(f"speculator {path!r} made a {type(speculator).__name__}, which is no Speculator")
    return speculator
