"""What users of other servers write, in the words of `SpeculativeConfig`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from paceline.config.method_names import DETECT, MAX_DEPTH, STACKS, SUFFIX_DEPTH, ModelFree

Data = Mapping[str, Any]

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

ALGORITHMS = {
    "EAGLE": "eagle",
    "EAGLE3": "eagle3",
    "NEXTN": "mtp",
    "STANDALONE": "draft_model",
    "NGRAM": "ngram",
}
"""SGLang's `speculative_algorithm`."""
UNSUPPORTED_KEYS = {
    "num_speculative_tokens_per_batch_size": "how many guesses a step verifies follows here from what its rows cost, "
    "whatever the batch: set num_speculative_tokens and max_tree_nodes to the most that you want",
    "synthetic_acceptance_rates": "set synthetic_acceptance_rate to the mean over the depths of the probability that "
    "all guesses down to there are accepted",
}
"""Keys of others that cannot be translated, and what to do."""
METHOD_KEYS = ("method", "speculative_method")
MODEL_KEYS = ("model", "draft_model_path", "speculative_draft_model_path")
SWITCHES = ("use_heterogeneous_vocab", "parallel_drafting")
"""Keys that are true or false and say what has another key or name here."""


def canonical_keys(data: Data) -> Data:
    """The same configuration, with what follows from what is left out. Raises ValueError for a contradiction."""
    for spell in KEY_TRANSLATIONS:
        data = spell(data)
    return data


def _others(data: Data) -> Data:
    """SGLang's name for the method, and keys that have none here."""
    for key, advice in UNSUPPORTED_KEYS.items():
        if key in data:
            raise ValueError(f"{key}: {advice}")
    if "speculative_algorithm" not in data:
        return data
    rest = dict(data)
    algorithm = rest.pop("speculative_algorithm")
    if str(algorithm).upper() not in ALGORITHMS:
        raise ValueError(f"speculative_algorithm is one of {', '.join(ALGORITHMS)}, not {algorithm!r}")
    method = ALGORITHMS[str(algorithm).upper()]
    if rest.setdefault("method", method) != method:
        raise ValueError("speculative_algorithm and method contradict each other: give one of them")
    return rest


def _heterogeneous_vocab(data: Data) -> Data:
    """vLLM's key for what it has of vocabulary mappings."""
    if "use_heterogeneous_vocab" not in data:
        return data
    rest = dict(data)
    wanted = rest.pop("use_heterogeneous_vocab")
    if not isinstance(wanted, bool):
        raise ValueError("use_heterogeneous_vocab is true or false")
    mapping = "intersection" if wanted else "none"
    if rest.setdefault("vocabulary_mapping", mapping) != mapping:
        raise ValueError("use_heterogeneous_vocab and vocabulary_mapping contradict each other: give one of them")
    return rest


def _parallel_drafting(data: Data) -> Data:
    """`"parallel_drafting": true` makes another method of the one that is named, as in vLLM."""
    if "parallel_drafting" not in data:
        return data
    rest = dict(data)
    wanted = rest.pop("parallel_drafting")
    if not isinstance(wanted, bool):
        raise ValueError("parallel_drafting is true or false")
    key = "speculative_method" if "speculative_method" in rest else "method"
    name = rest.get(key)
    if not wanted or name in PARALLEL.values():
        return rest
    ours = METHOD_ALIASES.get(str(name), str(name))
    if ours not in PARALLEL:
        raise ValueError(f"parallel_drafting goes with {' and '.join(PARALLEL)}, not with {name!r}")
    return {**rest, key: PARALLEL[ours]}


def _stack(data: Data) -> Data:
    """`"method": ["ngram", "draft_model"]` is what both would grow, in one tree. Model-free ones go beside."""
    for key in METHOD_KEYS:
        methods = data.get(key)
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


def _model_alone(data: Data) -> Data:
    """A checkpoint without a method says itself what it is for."""
    if not any(data.get(key) for key in MODEL_KEYS):
        return data
    named = {key: value for key, value in data.items() if key not in METHOD_KEYS or value is not None}
    return named if any(key in named for key in METHOD_KEYS) else {"method": DETECT, **named}


def _lookup_range(data: Data) -> Data:
    """Of the two bounds, one that is left out makes way for the other."""
    least, most = data.get("prompt_lookup_min"), data.get("prompt_lookup_max")
    if isinstance(most, int) and least is None:
        return {"prompt_lookup_min": max(1, min(2, most)), **data}
    if isinstance(least, int) and most is None:
        return {"prompt_lookup_max": max(5, least), **data}
    return data


def _suffix_depth(data: Data) -> Data:
    """Suffix decoding guesses as deep as it counts, as in vLLM, unless told otherwise."""
    if "suffix" not in (data.get("method"), data.get("speculative_method")):
        return data
    depth = data.get("suffix_decoding_max_tree_depth", SUFFIX_DEPTH)
    told = "num_speculative_tokens" in data or "speculative_num_steps" in data
    if told or not isinstance(depth, int):
        return data
    return {**data, "num_speculative_tokens": min(max(depth, 0), MAX_DEPTH)}


KEY_TRANSLATIONS: Sequence[Callable[[Data], Data]] = (
    _others,
    _heterogeneous_vocab,
    _stack,
    _parallel_drafting,
    _model_alone,
    _lookup_range,
    _suffix_depth,
)
"""In this order: the later ones read what the earlier ones wrote."""
