"""What a user may set: sampling of one request, speculation, the engine. Unknown keys are refused by name.

Nothing here needs torch; the gateway, the command line and the library share these classes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, NonNegativeInt, field_validator, model_validator

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
]
ModelFree = Literal["ngram", "suffix"]
DETECT = "detect"
"""The method that a checkpoint is for; `paceline.speculators.formats` finds it out."""
AUTO = "auto"
"""What fits the target, see `paceline.speculators.auto`."""
TOLD_BY_CHECKPOINT = (AUTO, DETECT, "dflash")
"""Methods of which a checkpoint says what the user need not, see `paceline.speculators.completed`."""
HEADS = ("eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "peagle", "dflash")
"""Methods that draft from what the target has computed."""
Strategy = Literal["coupled", "greedy", "residual", "typical-acceptance", "logit-comparison"]
VocabularyMappingName = Literal["none", "intersection", "strings"]
MAPPING_HINT = 'or set "vocabulary_mapping" to "intersection" or "strings"'
"""For whoever has a draft with another vocabulary than the target's."""

PARALLEL = {"draft_model": "pard", "eagle3": "peagle"}
"""What vLLM calls by the one name with `parallel_drafting`: K tokens in one pass."""
MTP_ALIASES = ("deepseek_mtp", "glm4_moe_mtp", "mimo_mtp", "qwen3_next_mtp", "qwen3_5_mtp")
"""vLLM's, by family; the target's checkpoint says which family it is."""
METHOD_ALIASES = {
    "standalone": "draft_model",
    "prompt_lookup": "ngram",
    "custom": "custom_class",
    "off": "none",
    **dict.fromkeys(MTP_ALIASES, "mtp"),
}

STACKS = "methods that draft together are ngram, suffix and at most one other, none of them twice"

METHOD_KEYS = ("method", "speculative_method")

_KEYS_OF_STRATEGIES = {
    ("block_verification",): ("residual",),
    ("posterior_threshold", "posterior_alpha"): ("typical-acceptance",),
    ("logit_comparison_eps",): ("logit-comparison",),
    ("use_relaxed_acceptance_for_thinking",): ("coupled", "greedy"),
    ("synthetic_acceptance_rate",): ("coupled",),
}

# Noise is keyed by an unsigned 64-bit seed; OpenAI and vLLM take a signed one, which maps onto it.
SEED_BITS = 64

MOST_DEPTH = 64
"""Of a node."""
SUFFIX_DEPTH = 24


class Settings(BaseModel):
    """Base of all settings: immutable, and a key nobody knows is an error that names it."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class SamplingParams(Settings):
    """How the target turns logits into a token, and when a request ends. Names and defaults are vLLM's."""

    temperature: float = Field(1.0, ge=0.0, le=100.0, allow_inf_nan=False)
    top_k: int = Field(0, ge=-1, description="0 and -1 keep all")
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(1.0, gt=0.0, le=100.0, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    logit_bias: dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-100.0, le=100.0)]] = {}
    bad_words: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...] = Field(
        (), description="token sequences that must not occur"
    )
    min_tokens: int = Field(0, ge=0)
    max_tokens: int = Field(16, ge=1)
    seed: int = Field(0, ge=-(2 ** (SEED_BITS - 1)), lt=2**SEED_BITS)
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    logprobs: int | None = Field(None, ge=0, le=20)

    @field_validator("top_k")
    @classmethod
    def _all_is_zero(cls, value: int) -> int:
        return max(value, 0)

    @field_validator("seed")
    @classmethod
    def _unsigned(cls, value: int) -> int:
        return value if value >= 0 else value + (1 << SEED_BITS)

    @field_validator("bad_words")
    @classmethod
    def _no_empty_word(cls, value: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        if any(not word for word in value):
            raise ValueError("a bad word needs at least one token")
        return value

    @model_validator(mode="after")
    def _min_within_max(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        return self

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether the law of a token depends on which tokens came before, beyond the model itself."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class SpeculativeOptions(Settings):
    """What one request asks of speculation: less than the deployment offers, never more."""

    enabled: bool | None = None
    num_speculative_tokens: int | None = Field(None, ge=0)
    max_tree_nodes: int | None = Field(None, ge=0)
    report: bool = False


class SpeculativeConfig(Settings):
    """How trees of guesses are grown and verified: `--speculative-config` on the command line.

    Keys carry the names of vLLM, SGLang and MAX where those exist.
    """

    method: Method = Field(
        "none",
        validation_alias=AliasChoices(*METHOD_KEYS),
        description="detect: what the checkpoint in `model` is for, as if only `model` is given; auto: that, or "
        "what fits the target, and suffix and ngram beside it",
    )
    beside: tuple[ModelFree, ...] = Field(
        (), description='draft too, inside the target; a list of methods sets it: ["ngram", "suffix", "draft_model"]'
    )
    model: str | None = Field(None, validation_alias=AliasChoices("model", "draft_model_path"))
    num_speculative_tokens: int = Field(
        5,
        ge=0,
        le=MOST_DEPTH,
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
    rejection_sampling_strategy: Strategy = "coupled"
    block_verification: bool = Field(False, description="residual: accept or refuse the guesses of a chain jointly")
    posterior_threshold: float = Field(
        0.09, gt=0.0, lt=1.0, description="typical-acceptance: a guess with a larger target probability always stands"
    )
    posterior_alpha: float = Field(
        0.3, gt=0.0, allow_inf_nan=False, description="typical-acceptance: so does one over this times exp(-entropy)"
    )
    logit_comparison_eps: float = Field(
        1e-5,
        ge=0.0,
        allow_inf_nan=False,
        description="logit-comparison: how much surer the draft may be, in nats",
    )
    use_relaxed_acceptance_for_thinking: bool = Field(
        False, description="inside thinking phases, accept guesses that the target finds probable; lossy"
    )
    relaxed_topk: int = Field(10, ge=1, description="relaxed acceptance: among so many of the most probable tokens")
    relaxed_delta: float = Field(
        0.6, ge=0.0, le=1.0, description="relaxed acceptance: with a probability so close to the largest"
    )
    begin_thinking_phase_token: int | None = Field(None, ge=0)
    end_thinking_phase_token: int | None = Field(None, ge=0)
    synthetic_acceptance_rate: float | None = Field(
        None,
        ge=0.0,
        le=1.0,
        description="benchmarks only: accept guesses whatever they are, so that the mean over the depths of the "
        "probability that all down to there are accepted is this; the output means nothing",
    )
    prompt_lookup_min: int = Field(2, ge=1)
    prompt_lookup_max: int = Field(5, ge=1)
    suffix_decoding_max_tree_depth: int = Field(
        SUFFIX_DEPTH, ge=1, le=256, description="longest match and guess together"
    )
    suffix_decoding_max_cached_requests: int = Field(
        10000, ge=0, description="finished requests whose output is looked up, too; 0: none"
    )
    suffix_decoding_max_spec_factor: float = Field(
        1.0, ge=0.0, le=256.0, description="tokens guessed ahead, for each one that matched"
    )
    suffix_decoding_min_token_prob: float = Field(
        0.1, ge=0.0, le=1.0, description="a path that is less likely, as counted, is not guessed"
    )
    draft_tensor_parallel_size: int = Field(1, ge=1)
    draft_devices: tuple[str, ...] = Field((), description="devices for draft workers, e.g. cuda:0; empty: the CPU")
    vocabulary_mapping: VocabularyMappingName = Field(
        "none",
        description="for a draft_model with another vocabulary than the target's. intersection: it guesses tokens that "
        "both have (use_heterogeneous_vocab, TLI); strings: what it says is tokenized again (SLEM, UAG)",
    )
    eagle_aux_hidden_state_layer_ids: tuple[NonNegativeInt, ...] | None = Field(
        None,
        description="what an EAGLE-3 head is fed with, if not what its checkpoint says, and what extract_hidden_states "
        "writes: n is the output of layer n",
    )
    hidden_states_path: str | None = Field(
        None, description="with method extract_hidden_states: the folder that files are written to, by who drafts"
    )
    rope_theta: float | None = Field(
        None,
        gt=0.0,
        description="base of a head's rotary embedding; many published ones were trained with 10000 and say otherwise",
    )
    speculator: str | None = Field(
        None, description="with method custom_class: dotted path of a Speculator class or factory; else it is `model`"
    )
    draft_placement: Literal["worker", "target"] = Field(
        "worker", description="draft in a pool of draft workers, or inside the target's process"
    )

    least_path_probability: float = Field(
        0.0035,
        ge=0.0,
        lt=1.0,
        description="a draft model's guess that is not likelier is not worth its bytes; 0: all are made",
    )
    draft_schedule: Literal["streamed", "lockstep"] = Field(
        "streamed",
        description="lockstep: draft after each commit while the target waits for the whole depth, as others do; to "
        "compare, with tree_width 1 and least_path_probability 0",
    )

    row_budget: bool = Field(
        True, description="false: draft and verify all that a request allows, whatever it costs or brings; to compare"
    )

    @model_validator(mode="before")
    @classmethod
    def _suffix_depth(cls, data: Any) -> Any:
        """Suffix decoding guesses as deep as it counts, as in vLLM, unless told otherwise."""
        if not isinstance(data, dict) or "suffix" not in (data.get("method"), data.get("speculative_method")):
            return data
        depth = data.get("suffix_decoding_max_tree_depth", SUFFIX_DEPTH)
        told = "num_speculative_tokens" in data or "speculative_num_steps" in data
        if told or not isinstance(depth, int):
            return data
        return {**data, "num_speculative_tokens": min(max(depth, 0), MOST_DEPTH)}

    @model_validator(mode="before")
    @classmethod
    def _lookup_range(cls, data: Any) -> Any:
        """Of the two bounds, one that is left out makes way for the other."""
        if not isinstance(data, dict):
            return data
        least, most = data.get("prompt_lookup_min"), data.get("prompt_lookup_max")
        if isinstance(most, int) and least is None:
            return {"prompt_lookup_min": max(1, min(2, most))} | data
        if isinstance(least, int) and most is None:
            return {"prompt_lookup_max": max(5, least)} | data
        return data

    @model_validator(mode="before")
    @classmethod
    def _model_alone(cls, data: Any) -> Any:
        """A checkpoint without a method says itself what it is for."""
        if not isinstance(data, dict) or not (data.get("model") or data.get("draft_model_path")):
            return data
        named = {key: value for key, value in data.items() if key not in METHOD_KEYS or value is not None}
        return named if any(key in named for key in METHOD_KEYS) else {"method": DETECT} | named

    @model_validator(mode="before")
    @classmethod
    def _stack(cls, data: Any) -> Any:
        """`"method": ["ngram", "draft_model"]` is what both would grow, in one tree. Model-free ones go beside."""
        for key in METHOD_KEYS:
            methods = data.get(key) if isinstance(data, dict) else None
            if isinstance(methods, (list, tuple)):
                names = [METHOD_ALIASES.get(str(name), str(name)) for name in methods]
                others = [name for name in names if name not in get_args(ModelFree)]
                if not names or len(others) > 1:
                    raise ValueError(STACKS)
                if data.get("beside"):
                    raise ValueError("a list of methods names all that draft: leave out `beside`")
                method = (others or names)[0]
                names.remove(method)
                return {**data, key: method, "beside": names}
        return data

    @model_validator(mode="before")
    @classmethod
    def _parallel_drafting(cls, data: Any) -> Any:
        """`"parallel_drafting": true` makes another method of the one that is named, as in vLLM."""
        if not isinstance(data, dict) or "parallel_drafting" not in data:
            return data
        rest = {key: value for key, value in data.items() if key != "parallel_drafting"}
        key = "speculative_method" if "speculative_method" in rest else "method"
        name = rest.get(key)
        if not data["parallel_drafting"] or name in PARALLEL.values():
            return rest
        if METHOD_ALIASES.get(str(name), name) not in PARALLEL:
            raise ValueError(f"parallel_drafting goes with {' and '.join(PARALLEL)}, not with {name!r}")
        return rest | {key: PARALLEL[METHOD_ALIASES.get(str(name), str(name))]}

    @model_validator(mode="before")
    @classmethod
    def _heterogeneous_vocab(cls, data: Any) -> Any:
        """vLLM's key for what it has of vocabulary mappings."""
        if not isinstance(data, dict) or "use_heterogeneous_vocab" not in data:
            return data
        data = dict(data)
        wanted = data.pop("use_heterogeneous_vocab")
        if not isinstance(wanted, bool):
            raise ValueError("use_heterogeneous_vocab is true or false")
        mapping = "intersection" if wanted else "none"
        if data.setdefault("vocabulary_mapping", mapping) != mapping:
            raise ValueError("use_heterogeneous_vocab and vocabulary_mapping contradict each other: give one of them")
        return data

    @field_validator("method", mode="before")
    @classmethod
    def _known_method(cls, value: Any) -> Any:
        if value is None:
            return "none"
        return METHOD_ALIASES.get(value, value) if isinstance(value, str) else value

    @field_validator("draft_tensor_parallel_size")
    @classmethod
    def _one_rank(cls, value: int) -> int:
        if value != 1:
            raise ValueError("more than 1 is planned but not built yet")
        return value

    @model_validator(mode="after")
    def _complete(self) -> SpeculativeConfig:
        together = (self.method, *self.beside)
        if self.beside and (self.method == "none" or len(set(together)) < len(together)):
            raise ValueError(STACKS)
        needs_none = self.method == "mtp"  # its layer lies in the target's checkpoint
        if self.method in (DETECT, "draft_model", "pard", *HEADS) and not (self.model or needs_none):
            raise ValueError(f"method {self.method} needs `model`: the path of the draft's checkpoint")
        if self.method == "custom_class" and not (self.speculator or self.model):
            raise ValueError("method custom_class needs `speculator`: the dotted path of a class or factory")
        if self.method == "extract_hidden_states" and not self.hidden_states_path:
            raise ValueError("method extract_hidden_states needs `hidden_states_path`: the folder that it writes to")
        if self.vocabulary_mapping != "none" and self.method != "draft_model":
            raise ValueError("a vocabulary_mapping is for method draft_model")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min {self.prompt_lookup_min} exceeds prompt_lookup_max {self.prompt_lookup_max}"
            )
        return self

    @model_validator(mode="after")
    def _one_way_to_verify(self) -> SpeculativeConfig:
        """Keys of one strategy beside the name of another mean nothing."""
        strategy = self.rejection_sampling_strategy
        for keys, owners in _KEYS_OF_STRATEGIES.items():
            for key in keys:
                if strategy not in owners and getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"{key} means nothing to rejection_sampling_strategy {strategy}")
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
    def enabled(self) -> bool:
        return self.method != "none" and self.num_speculative_tokens > 0 and self.max_tree_nodes > 0

    def limits(self, options: SpeculativeOptions) -> tuple[int, int]:
        """Deepest node and most nodes per step that a request with these options may have. (0, 0) is off."""
        if not self.enabled or options.enabled is False:
            return 0, 0
        depth = _least(self.num_speculative_tokens, options.num_speculative_tokens)
        nodes = _least(self.max_tree_nodes, options.max_tree_nodes)
        return (depth, nodes) if depth and nodes else (0, 0)


class EngineConfig(Settings):
    """One target or draft worker's engine."""

    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: as the checkpoint says")
    device: str = "cpu"
    threads: int = Field(1, ge=1, description="CPU threads for the model")
    cpus: tuple[NonNegativeInt, ...] | None = Field(
        None, description="CPU cores to which a target is bound; empty: any; None: as whoever starts it thinks best"
    )
    slots: int = Field(16384, ge=256, description="positions the KV cache holds, over all requests")
    max_model_len: int | None = Field(None, ge=2, description="longest prompt plus output; None: the model's own")
    max_num_seqs: int = Field(64, ge=1, description="requests that run at once")
    max_num_batched_rows: int = Field(256, ge=8, description="rows of one forward pass")
    enable_prefix_caching: bool = True


def _least(configured: int, asked: int | None) -> int:
    return configured if asked is None else min(configured, asked)
