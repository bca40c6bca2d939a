"""The ways to draft by name, and what is to be known of them where nothing is computed."""

from __future__ import annotations

from typing import Literal

Method = Literal[
    "none",
    "auto",
    "detect",
    "draft_model",
    "eagle",
    "eagle3",
    "mtp",
    "medusa",
    "mlp_speculator",
    "pard",
    "peagle",
    "dflash",
    "ngram",
    "suffix",
    "custom_class",
    "extract_hidden_states",
    "pool",
]
ModelFree = Literal["ngram", "suffix"]
DETECT = "detect"
"""The method that a checkpoint is for; `paceline.drafting.checkpoint_detection` finds it out."""
AUTO = "auto"
"""What fits the target, see `paceline.drafting.auto_method`."""
POOL = "pool"
"""What the draft workers in the registry do: for targets, which learn it from them."""
METHODS_READ_FROM_CHECKPOINT = (AUTO, DETECT, "dflash")
"""Methods of which a checkpoint says what the user need not, see `paceline.drafting.complete_config`."""
HEADS = ("eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "peagle", "dflash")
"""Methods that draft from what the target has computed."""
SHAREABLE = ("draft_model", "pard")
"""Methods with a model of their own, which several processes can share."""
Strategy = Literal["coupled", "greedy", "residual", "typical-acceptance", "logit-comparison"]
VocabularyMappingName = Literal["none", "intersection", "strings"]
MAPPING_HINT = 'or set "vocabulary_mapping" to "intersection" or "strings"'
"""For whoever has a draft with another vocabulary than the target's."""

MAX_DEPTH = 64
"""Of a node."""
SUFFIX_DEPTH = 24

STACKS = "methods that draft together are ngram, suffix and at most one other, none of them twice"
