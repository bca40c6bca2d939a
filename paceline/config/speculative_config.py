"""How draft tokens are made and verified: the settings of a deployment, and the options of one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

from pydantic import AliasChoices, Field, NonNegativeInt, field_validator, model_validator

from paceline.config.key_aliases import METHOD_ALIASES, METHOD_KEYS, MODEL_KEYS, canonical_keys
from paceline.config.method_names import (
    AUTO,
    DETECT,
    MAX_DEPTH,
    METHODS,
    MODEL,
    MODEL_METHODS,
    POOL,
    STACKING_RULE,
    SUFFIX_DEPTH,
    LookupMethod,
    Method,
    VocabularyMappingName,
)
from paceline.config.settings import Settings
from paceline.config.verification_strategies import STRATEGIES, Strategy, StrategyName


class SpeculativeOptions(Settings):
    """Options of one request. They can only reduce what the deployment allows."""

    enabled: bool | None = None
    num_speculative_tokens: int | None = Field(None, ge=0)
    max_tree_nodes: int | None = Field(None, ge=0)
    report: bool = False


class SpeculativeConfig(Settings):
    """`--speculative-config` on the command line. Keys have the names of vLLM, SGLang and MAX where those exist."""

    method: Method = Field(
        "none",
        validation_alias=AliasChoices(*METHOD_KEYS),
        description="detect: the method of the checkpoint in `model`, as if only `model` is given; auto: the same, or "
        "without `model` a method that fits the target, and suffix and ngram beside it; pool: for a target, the method "
        "of its draft workers",
    )
    beside: tuple[LookupMethod, ...] = Field(
        (),
        description="more methods, which draft inside the target; also set by a list of methods, such as "
        '["ngram", "suffix", "draft_model"]',
    )
    model: str | None = Field(None, validation_alias=AliasChoices(*MODEL_KEYS))
    num_speculative_tokens: int = Field(
        5,
        ge=0,
        le=MAX_DEPTH,
        validation_alias=AliasChoices("num_speculative_tokens", "speculative_num_steps"),
        description="deepest node verified in one step; 5, and with method suffix as deep as its tree",
    )
    tree_width: int = Field(
        3,
        ge=1,
        le=32,
        validation_alias=AliasChoices("tree_width", "speculative_eagle_topk"),
        description="most children a node may get; 1 makes a chain",
    )
    max_tree_nodes: int = Field(
        32,
        ge=0,
        le=1024,
        validation_alias=AliasChoices("max_tree_nodes", "speculative_num_draft_tokens"),
        description="most nodes of one request verified in one step",
    )
    rejection_sampling_strategy: StrategyName = "coupled"
    block_verification: bool = Field(False, description="residual: accept the draft tokens of a chain jointly")
    posterior_threshold: float = Field(
        0.09, gt=0.0, lt=1.0, description="typical-acceptance: accept draft tokens with a larger target probability"
    )
    posterior_alpha: float = Field(
        0.3,
        gt=0.0,
        allow_inf_nan=False,
        description="typical-acceptance: or with one over this times exp(-entropy)",
    )
    logit_comparison_eps: float = Field(
        1e-5,
        ge=0.0,
        allow_inf_nan=False,
        description="logit-comparison: how much larger the draft's log-probability may be",
    )
    use_relaxed_acceptance_for_thinking: bool = Field(
        False, description="inside thinking phases, accept draft tokens that the target finds probable; lossy"
    )
    relaxed_topk: int = Field(10, ge=1, description="relaxed acceptance: among this many most probable tokens")
    relaxed_delta: float = Field(
        0.6, ge=0.0, le=1.0, description="relaxed acceptance: within this distance of the largest probability"
    )
    begin_thinking_phase_token: int | None = Field(None, ge=0)
    end_thinking_phase_token: int | None = Field(None, ge=0)
    synthetic_acceptance_rate: float | None = Field(
        None,
        ge=0.0,
        le=1.0,
        description="benchmarks only: accept draft tokens at random; this is the mean over the depths of the "
        "probability that all draft tokens down to that depth are accepted; the output means nothing",
    )
    prompt_lookup_min: int = Field(2, ge=1)
    prompt_lookup_max: int = Field(5, ge=1)
    suffix_decoding_max_tree_depth: int = Field(
        SUFFIX_DEPTH, ge=1, le=256, description="longest match and draft together"
    )
    suffix_decoding_max_cached_requests: int = Field(
        10000, ge=0, description="finished requests whose output is looked up too; 0: none"
    )
    suffix_decoding_max_spec_factor: float = Field(
        1.0, ge=0.0, le=256.0, description="draft tokens for each matched token"
    )
    suffix_decoding_min_token_prob: float = Field(
        0.1, ge=0.0, le=1.0, description="paths with a smaller counted probability are not drafted"
    )
    draft_tensor_parallel_size: int = Field(
        1, ge=1, description="ranks of the draft model; independent of the target's"
    )
    draft_devices: tuple[str, ...] = Field(
        (), description="devices for draft workers, e.g. cuda:0; empty: the target's"
    )
    vocabulary_mapping: VocabularyMappingName = Field(
        "none",
        description="for a draft_model with another vocabulary than the target's. intersection: it drafts tokens that "
        "both have (use_heterogeneous_vocab, TLI); strings: the text that it drafts is tokenized again (SLEM, UAG)",
    )
    eagle_aux_hidden_state_layer_ids: tuple[NonNegativeInt, ...] | None = Field(
        None,
        description="target layers whose output an EAGLE-3 head reads, instead of those in its checkpoint, and "
        "extract_hidden_states writes; n is the output of layer n",
    )
    norm_output: bool | None = Field(
        None,
        description="whether an EAGLE-3 head reads its own state after the last norm, instead of its checkpoint's "
        "value: SpecForge wrote true, until its pull request 879, for heads that read the state before it",
    )
    hidden_states_path: str | None = Field(
        None, description="with method extract_hidden_states: the folder of the files, on the machine that drafts"
    )
    rope_theta: float | None = Field(
        None,
        gt=0.0,
        description="base of a head's rotary embedding, instead of its checkpoint's, which is often wrong: many "
        "published heads were trained with 10000",
    )
    speculator: str | None = Field(
        None, description="with method custom_class: dotted path of a Speculator class or factory; default: `model`"
    )
    draft_placement: Literal["worker", "target"] = Field(
        "worker", description="draft in a pool of draft workers, or inside the target's process"
    )

    least_path_probability: float = Field(
        0.0035,
        ge=0.0,
        lt=1.0,
        description="a draft's network makes no tokens on paths that are not likelier than this; 0: all are made",
    )
    draft_schedule: Literal["streamed", "lockstep"] = Field(
        "streamed",
        description="lockstep: draft after each commit while the target waits for the whole depth, as other servers "
        "do, whether it pays or not; for comparisons, with tree_width 1 and least_path_probability 0",
    )

    row_budget: bool = Field(
        True, description="false: draft and verify all that a request allows, whatever it costs; for comparisons"
    )

    @model_validator(mode="before")
    @classmethod
    def _canonical_keys(cls, data: Any) -> Any:
        return canonical_keys(data) if isinstance(data, Mapping) else data

    @field_validator("method", mode="before")
    @classmethod
    def _known_method(cls, value: Any) -> Any:
        if value is None:
            return "none"
        return METHOD_ALIASES.get(value, value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_method(self) -> SpeculativeConfig:
        together = (self.method, *self.beside)
        if self.beside and (self.method == "none" or len(set(together)) < len(together)):
            raise ValueError(STACKING_RULE)
        for method in together:
            needs = MODEL if method == DETECT else METHODS[method].needs if method in METHODS else {}
            if needs and not any(getattr(self, key) for key in needs):
                key, holds = next(iter(needs.items()))
                raise ValueError(f"method {method} needs `{key}`: {holds}")
        if self.method == POOL and self.draft_placement == "target":
            raise ValueError("method pool leaves drafting to draft workers: leave out draft_placement")
        if self.vocabulary_mapping != "none" and self.method != "draft_model":
            raise ValueError("a vocabulary_mapping is for method draft_model")
        if self.draft_tensor_parallel_size > 1:
            self._check_sharing()
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min {self.prompt_lookup_min} exceeds prompt_lookup_max {self.prompt_lookup_max}"
            )
        return self

    def _check_sharing(self) -> None:
        if self.method not in (AUTO, DETECT, *MODEL_METHODS):
            raise ValueError(
                f"draft_tensor_parallel_size is for {' and '.join(MODEL_METHODS)}: the draft of {self.method} is too "
                "small to share"
            )
        if self.draft_placement == "target":
            raise ValueError("draft_tensor_parallel_size over 1 needs draft_placement worker: a process of its own")

    @model_validator(mode="after")
    def _check_strategy_keys(self) -> SpeculativeConfig:
        """Refuse keys that the chosen strategy does not use."""
        chosen = STRATEGIES[self.rejection_sampling_strategy]
        for key in chain.from_iterable(strategy.keys for strategy in STRATEGIES.values()):
            if key not in chosen.keys and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} means nothing to rejection_sampling_strategy {chosen.name}")
        if self.synthetic_acceptance_rate is not None and self.use_relaxed_acceptance_for_thinking:
            raise ValueError("synthetic_acceptance_rate leaves use_relaxed_acceptance_for_thinking nothing to accept")
        return self

    @model_validator(mode="after")
    def _thinking_phases(self) -> SpeculativeConfig:
        begin, end = self.begin_thinking_phase_token, self.end_thinking_phase_token
        if self.use_relaxed_acceptance_for_thinking and (begin is None or end is None):
            raise ValueError(
                "use_relaxed_acceptance_for_thinking needs begin_thinking_phase_token and end_thinking_phase_token: "
                "the ids of the tokens around a thinking phase"
            )
        if begin is not None and begin == end:
            raise ValueError(f"begin_thinking_phase_token and end_thinking_phase_token are both {begin}")
        for key in ("relaxed_topk", "relaxed_delta", "begin_thinking_phase_token", "end_thinking_phase_token"):
            relaxed = self.use_relaxed_acceptance_for_thinking
            if not relaxed and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} means nothing without use_relaxed_acceptance_for_thinking")
        return self

    @property
    def strategy(self) -> Strategy:
        """The strategy of the deployment. Two of them have keys of their own and modify the named strategy."""
        strategy = STRATEGIES[self.rejection_sampling_strategy]
        if self.synthetic_acceptance_rate is not None:
            return replace(strategy, name="synthetic", exact=False, drafter_invariant=False)
        if self.use_relaxed_acceptance_for_thinking:
            return replace(strategy, name="relaxed-thinking", exact=False, drafter_invariant=False)
        return strategy

    @property
    def enabled(self) -> bool:
        return self.method != "none" and self.num_speculative_tokens > 0 and self.max_tree_nodes > 0

    def limits(self, options: SpeculativeOptions) -> tuple[int, int]:
        """The deepest node and the most nodes per step of a request with these options; (0, 0): no speculation."""
        if not self.enabled or options.enabled is False:
            return 0, 0
        depth = _least(self.num_speculative_tokens, options.num_speculative_tokens)
        nodes = _least(self.max_tree_nodes, options.max_tree_nodes)
        return (depth, nodes) if depth and nodes else (0, 0)


def _least(configured: int, asked: int | None) -> int:
    return configured if asked is None else min(configured, asked)
