"""Translates configuration keys and values of other servers (vLLM, SGLang) to those of `SpeculativeConfig`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.config.method_names import DETECT, LOOKUP_METHODS, MAX_DEPTH, METHODS, STACKING_RULE, SUFFIX_DEPTH

Data = Mapping[str, Any]

PARALLEL = {name: method.parallel for name, method in METHODS.items() if method.parallel}
"""vLLM's `parallel_drafting`: the method that drafts K tokens in one pass, by the one that drafts them in turn."""
METHOD_ALIASES = {"off": "none", **{alias: name for name, method in METHODS.items() for alias in method.aliases}}
ALGORITHMS = {each: name for name, method in METHODS.items() for each in method.algorithms}
"""SGLang's `speculative_algorithm`."""
UNSUPPORTED_KEYS = {
    "num_speculative_tokens_per_batch_size": "how many draft tokens a step verifies follows from the cost of its rows, "
    "whatever the batch: set num_speculative_tokens and max_tree_nodes to the most that you want",
    "synthetic_acceptance_rates": "set synthetic_acceptance_rate to the mean over the depths of the probability that "
    "all draft tokens down to that depth are accepted",
}
"""Keys that cannot be translated, and what to do instead."""
METHOD_KEYS = ("method", "speculative_method")
MODEL_KEYS = ("model", "draft_model_path", "speculative_draft_model_path")
SWITCHES = ("use_heterogeneous_vocab", "parallel_drafting")
"""Boolean keys that are translated to another key or method."""


def canonical_keys(data: Data) -> Data:
    """The same configuration with our keys, and with the defaults that depend on other keys.

    Raises ValueError for a contradiction.
    """
    for translate in KEY_TRANSLATIONS:
        data = translate(data)
    return data


def _refuse_unsupported(data: Data) -> Data:
    for key, advice in UNSUPPORTED_KEYS.items():
        if key in data:
            raise ValueError(f"{key}: {advice}")
    return data


def _speculative_algorithm(data: Data) -> Data:
    if "speculative_algorithm" not in data:
        return data
    algorithm = data["speculative_algorithm"]
    if str(algorithm).upper() not in ALGORITHMS:
        raise ValueError(f"speculative_algorithm is one of {', '.join(sorted(ALGORITHMS))}, not {algorithm!r}")
    return _replaced(data, "speculative_algorithm", "method", ALGORITHMS[str(algorithm).upper()])


def _heterogeneous_vocab(data: Data) -> Data:
    if "use_heterogeneous_vocab" not in data:
        return data
    mapping = "intersection" if _switch(data, "use_heterogeneous_vocab") else "none"
    return _replaced(data, "use_heterogeneous_vocab", "vocabulary_mapping", mapping)


def _parallel_drafting(data: Data) -> Data:
    """With `parallel_drafting`, vLLM's name of a method means another one."""
    if "parallel_drafting" not in data:
        return data
    wanted = _switch(data, "parallel_drafting")
    rest = _without(data, "parallel_drafting")
    key = "speculative_method" if "speculative_method" in rest else "method"
    name = rest.get(key)
    if not wanted or name in PARALLEL.values():
        return rest
    ours = METHOD_ALIASES.get(str(name), str(name))
    if ours not in PARALLEL:
        raise ValueError(f"parallel_drafting goes with {' and '.join(PARALLEL)}, not with {name!r}")
    return {**rest, key: PARALLEL[ours]}


def _method_list(data: Data) -> Data:
    """Of a list of methods, which grow one tree together, lookup methods go to `beside`."""
    for key in METHOD_KEYS:
        methods = data.get(key)
        if isinstance(methods, (list, tuple)):
            names = [METHOD_ALIASES.get(str(name), str(name)) for name in methods]
            others = [name for name in names if name not in LOOKUP_METHODS]
            if not names or len(others) > 1:
                raise ValueError(STACKING_RULE)
            if data.get("beside"):
                raise ValueError("a list of methods names all that draft: leave out `beside`")
            method = (others or names)[0]
            names.remove(method)
            return {**data, key: method, "beside": names}
    return data


def _model_alone(data: Data) -> Data:
    """A checkpoint without a method means method `detect`."""
    if not any(data.get(key) for key in MODEL_KEYS):
        return data
    named = {key: value for key, value in data.items() if key not in METHOD_KEYS or value is not None}
    return named if any(key in named for key in METHOD_KEYS) else {"method": DETECT, **named}


def _lookup_range(data: Data) -> Data:
    """If one bound is given, the other one's default must not contradict it."""
    least, most = data.get("prompt_lookup_min"), data.get("prompt_lookup_max")
    if isinstance(most, int) and least is None:
        return {"prompt_lookup_min": max(1, min(2, most)), **data}
    if isinstance(least, int) and most is None:
        return {"prompt_lookup_max": max(5, least), **data}
    return data


def _suffix_depth(data: Data) -> Data:
    """By default, suffix decoding drafts as deep as it counts, as in vLLM."""
    if "suffix" not in (data.get("method"), data.get("speculative_method")):
        return data
    depth = data.get("suffix_decoding_max_tree_depth", SUFFIX_DEPTH)
    given = "num_speculative_tokens" in data or "speculative_num_steps" in data
    if given or not isinstance(depth, int):
        return data
    return {**data, "num_speculative_tokens": min(max(depth, 0), MAX_DEPTH)}


KEY_TRANSLATIONS: Sequence[Callable[[Data], Data]] = (
    _refuse_unsupported,
    _speculative_algorithm,
    _heterogeneous_vocab,
    _method_list,
    _parallel_drafting,
    _model_alone,
    _lookup_range,
    _suffix_depth,
)
"""Later ones read the results of earlier ones."""


def _switch(data: Data, key: str) -> bool:
    value = data[key]
    if not isinstance(value, bool):
        raise ValueError(f"{key} is true or false")
    return value


def _without(data: Data, key: str) -> dict[str, Any]:
    return {each: value for each, value in data.items() if each != key}


def _replaced(data: Data, key: str, our_key: str, value: str) -> Data:
    """`data` with `our_key` instead of `key`. Raises ValueError if `our_key` has another value."""
    rest = _without(data, key)
    if rest.setdefault(our_key, value) != value:
        raise ValueError(f"{key} and {our_key} contradict each other: give one of them")
    return rest
