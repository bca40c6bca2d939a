"""Speculators: what grows token trees. `speculator` is the interface, `methods` has one file for each method.

    method                 speculator             way to grow   network or lookup
    draft_model            NetworkSpeculator      BestFirst     ModelNetwork
    eagle                  NetworkSpeculator      BestFirst     EagleNetwork
    eagle3                 NetworkSpeculator      BestFirst     Eagle3Network
    mtp                    NetworkSpeculator      BestFirst     LlamaHead, TransformersHead
    pard                   NetworkSpeculator      Blocks        MaskTokens over ModelNetwork
    peagle                 NetworkSpeculator      Blocks        MaskTokens over Eagle3Network
    dflash                 NetworkSpeculator      Blocks        DFlashNetwork
    dflash2                NetworkSpeculator      Blocks        DFlashNetwork with CandidateSelector
    dspark                 NetworkSpeculator      Blocks        DFlashNetwork with MarkovHead
    xpress                 NetworkSpeculator      Blocks        DFlashNetwork with Refiner
    medusa                 NetworkSpeculator      Blocks        MedusaHeads
    mlp_speculator         NetworkSpeculator      Levels        MlpNetwork, LstmNetwork
    ngram                  LookupSpeculator       -             NGramLookup
    suffix                 LookupSpeculator       -             SuffixLookup
    extract_hidden_states  ExtractHiddenStates    -             -

Each of these keeps a replica of every request's tree (`TreeSpeculator`), and beside it the request's state, which is a
class of the way to grow. `RetokenizingSpeculator` drafts in another vocabulary with a speculator of its own. The calls:

    open      a request's state: its history, its input tokens and their slots; a lookup's tokens
    context   hidden states are queued; refresh
    commit    root_moved: which slots stay; then tokens, slots and states; refresh
    limit     refresh: the request decides again what to draft
    close     its slots are free
    grow      the way to grow runs the network over rows that it chooses, and adds the children that the logits give
"""

from __future__ import annotations

from paceline.config import METHODS, METHODS_READ_FROM_CHECKPOINT, SpeculativeConfig
from paceline.drafting.method_registry import (
    TargetWeightsProvider,
    build_lookups,
    build_speculator,
    hidden_state_layers,
    method_hook,
)
from paceline.drafting.speculator import (
    Commit,
    Context,
    DraftDescription,
    DraftError,
    DraftingLimits,
    Limit,
    Opening,
    Speculator,
)
from paceline.model_names import resolve_model

__all__ = [
    "Commit",
    "Context",
    "DraftDescription",
    "DraftError",
    "DraftingLimits",
    "Limit",
    "Opening",
    "Speculator",
    "TargetWeightsProvider",
    "build_lookups",
    "build_speculator",
    "complete_config",
    "hidden_state_layers",
]


def complete_config(config: SpeculativeConfig, target: str | None = None) -> SpeculativeConfig:
    """The configuration with what checkpoints set where the user sets nothing: the method, and keys of the method.

    `target`: by name, for method `auto`. Raises `CheckpointError` or `ModelNotFoundError`.
    """
    if config.method not in METHODS_READ_FROM_CHECKPOINT:
        return config
    # Not at the top: these import torch.
    from paceline.drafting.auto_method import detect_method, resolve_auto
    from paceline.model.checkpoint import Checkpoint

    config = detect_method(resolve_auto(config, target))
    complete = method_hook(config.method, "complete") if config.method in METHODS and config.model else None
    return complete(config, Checkpoint(resolve_model(config.model or ""))) if complete else config
