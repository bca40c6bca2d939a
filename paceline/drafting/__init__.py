"""Speculators: what grows token trees. `speculator` is the interface, `methods` has one file for each method.

    Speculator                       the interface                                         speculator.py
      TreeSpeculator                 a replica of each request's tree                      tree_speculator.py
        ExtractHiddenStates          writes files                                          methods
        RetokenizingSpeculator       drafts in another vocabulary                          vocabulary
        LookupSpeculator             ngram, suffix                                         tree_speculator.py
        PredictingSpeculator         predicts the target's draws                           draw_prediction.py
          StatelessSpeculator        medusa, mlp_speculator: from one hidden state         stateless_heads.py
          CachedSpeculator           a KV cache, divided between links                     cached_speculator.py
            BestFirstSpeculator      draft_model: one token after another                  best_first.py
              HeadSpeculator         eagle, eagle3, mtp                                    heads/head_speculator.py
              IntersectionSpeculator draft_model, drafts in another vocabulary             vocabulary
            ParallelSpeculator       dflash: several tokens per pass                       parallel_drafts.py
              MaskTokenSpeculator    pard, peagle                                          parallel_drafts.py

A request's state is a class beside its speculator's, which derives in the same way (`TreeRequest`, `LookupRequest`,
`PredictedRequest`, ...). Of `Speculator`'s methods, subclasses override `context`, `close` and `grow`. All call these
hooks, in this order:

    open       new_request, in a PredictingSpeculator begin; a CachedSpeculator then takes slots
    context    the states go to the request; stateless: request.refresh_frontier
    commit     advance: request.root_moved, the history and the states, request.refresh_frontier; lookups: index
    limit      limits_changed: request.refresh_frontier
    close      release
    grow       lookups: add_nodes; stateless: draft_round; best first: run; parallel: run_pass, request.add_tokens
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
from paceline.drafting.speculator import Commit, Context, DraftError, Limit, Opening, Speculator
from paceline.model_names import resolve_model

__all__ = [
    "Commit",
    "Context",
    "DraftError",
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
    from paceline.drafting.auto_method import resolve_auto
    from paceline.drafting.checkpoint_detection import detect_method
    from paceline.model.checkpoint import Checkpoint

    config = detect_method(resolve_auto(config, target))
    complete = method_hook(config.method, "complete") if config.method in METHODS and config.model else None
    return complete(config, Checkpoint(resolve_model(config.model or ""))) if complete else config
