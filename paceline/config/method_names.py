"""The table of drafting methods, without code: a method is one row here and one file in `paceline/drafting/methods`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

DETECT = "detect"
"""The method that the checkpoint is for, see `paceline.drafting.auto_method`."""
AUTO = "auto"
"""A method that suits the target, see `paceline.drafting.auto_method`."""
POOL = "pool"
"""For a target: the method of the registered draft workers."""


@dataclass(frozen=True, slots=True)
class DraftMethod:
    """One row of `METHODS`."""

    kind: Literal["model", "head", "lookup", "custom"]
    """model: a language model of its own, which several ranks can share. head: drafts from the target's hidden states
    or weights. lookup: needs no weights, and can draft beside another method inside the target's process."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Keys of `SpeculativeConfig`, one of which must be set, and what each holds, for the error message."""
    cached_layers: Literal["none", "one", "all"] = "none"
    """Layers that have a KV cache: all that config.json counts, or one."""
    completed: bool = False
    """Whether the checkpoint sets keys that the user leaves out."""
    aliases: tuple[str, ...] = ()
    """Names of the method in other servers."""
    algorithms: tuple[str, ...] = ()
    """SGLang's names for `speculative_algorithm`."""
    parallel: str = ""
    """The method that vLLM's `parallel_drafting` makes of this one."""


MODEL = {
    "model": "the path of the draft's checkpoint (a target whose draft workers are started elsewhere needs none with "
    "method pool)"
}
MTP_ALIASES = ("deepseek_mtp", "glm4_moe_mtp", "mimo_mtp", "qwen3_next_mtp", "qwen3_5_mtp")
"""vLLM's, by model family; the target's checkpoint names the family."""

METHODS: Mapping[str, DraftMethod] = {
    "draft_model": DraftMethod(
        "model", MODEL, "all", aliases=("standalone",), algorithms=("STANDALONE",), parallel="pard"
    ),
    "mlp_speculator": DraftMethod("head", MODEL),
    "medusa": DraftMethod("head", MODEL),
    "dflash": DraftMethod("head", MODEL, "all", completed=True, algorithms=("DFLASH",)),
    "dflash2": DraftMethod("head", MODEL, "all", completed=True),
    "dspark": DraftMethod("head", MODEL, "all", completed=True, algorithms=("DSPARK",)),
    "xpress": DraftMethod("head", MODEL, "all", completed=True),
    "peagle": DraftMethod("head", MODEL, "one"),
    "pard": DraftMethod("model", MODEL, "all"),
    "eagle3": DraftMethod("head", MODEL, "one", algorithms=("EAGLE3",), parallel="peagle"),
    "eagle": DraftMethod("head", MODEL, "one", algorithms=("EAGLE",)),
    # Without `model` the layer is in the target's checkpoint.
    "mtp": DraftMethod("head", {}, "one", aliases=MTP_ALIASES, algorithms=("NEXTN",)),
    "suffix": DraftMethod("lookup"),
    "ngram": DraftMethod("lookup", aliases=("prompt_lookup",), algorithms=("NGRAM",)),
    "custom_class": DraftMethod(
        "custom", {"speculator": "the dotted path of a class or factory", **MODEL}, aliases=("custom",)
    ),
    "extract_hidden_states": DraftMethod("custom", {"hidden_states_path": "the folder that it writes to"}),
}
"""In the order in which a checkpoint is compared with them: the first method that matches is taken."""

HEADS = tuple(name for name, method in METHODS.items() if method.kind == "head")
MODEL_METHODS = tuple(name for name, method in METHODS.items() if method.kind == "model")
LOOKUP_METHODS = tuple(name for name, method in METHODS.items() if method.kind == "lookup")
METHODS_READ_FROM_CHECKPOINT = (AUTO, DETECT, *(name for name, method in METHODS.items() if method.completed))
"""Methods that `paceline.drafting.complete_config` changes or completes."""

if TYPE_CHECKING:  # a type checker cannot evaluate the table
    Method = str
    LookupMethod = str
else:
    Method = Literal["none", AUTO, DETECT, *METHODS, POOL]
    LookupMethod = Literal[LOOKUP_METHODS]
VocabularyMappingName = Literal["none", "intersection", "strings"]
MAPPING_HINT = 'or set "vocabulary_mapping" to "intersection" or "strings"'
"""Advice for a draft whose vocabulary differs from the target's."""

MAX_DEPTH = 64
"""Depth of the deepest node."""
SUFFIX_DEPTH = 24

STACKING_RULE = "methods that draft together are ngram, suffix and at most one other, none of them twice"
