"""Every combination of the chart's main values; `python -m tests.deploy.combinations` (`make chart`) checks them all.

The last line is JSON: numbers of combinations and of valid objects by kind.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product

from tests.deploy.helm import ON_CPUS, Values, merged, render
from tests.deploy.validation import check

GPU: Values = {
    "model": {"path": "/models/llama-70b", "claimName": "checkpoints"},
    "speculation": {"method": "draft_model", "model": "/models/llama-1b", "num_speculative_tokens": 6},
}
MONITORING: Values = {
    "monitoring": {"enabled": True, "labels": {"release": "prometheus"}},
    "tracing": {"otlpEndpoint": "http://collector.monitoring:4318"},
}
RAY = {"enabled": True, "tensorParallelSize": 2, "tokenSecret": {"name": "ray"}}
VLLM = {"enabled": True, "python": sys.executable, "engineArgs": {"quantization": "fp8"}}
"""With a Python that this machine has: a target refuses another one."""
CHOICES: dict[str, dict[str, Values]] = {
    "machines": {"cpu": ON_CPUS, "gpu": GPU},
    "engine": {
        "own": {},
        "vllm": {"target": {"vllm": VLLM, "sharedMemory": "8Gi", "cacheClaimName": "compiled"}},
    },
    "ray": {"off": {}, "on": {"target": {"replicas": 2, "ray": RAY}}},
    "drafts": {
        "workers": {},
        "lookup": {"speculation": {"method": "ngram", "model": None, "beside": []}, "draft": {"enabled": False}},
    },
    "redis": {
        "own": {},
        "password": {"redis": {"passwordSecret": {"name": "redis"}}},
        "external": {"redis": {"enabled": False, "external": {"urlSecret": {"name": "redis"}}}},
    },
    "autoscaling": {
        "none": {},
        "hpa": {**MONITORING, "autoscaling": {"kind": "hpa"}},
        "keda": {**MONITORING, "autoscaling": {"kind": "keda", "prometheusUrl": "http://prometheus.monitoring:9090"}},
    },
    "tls": {
        "off": {},
        "on": {
            "gateway": {"tlsSecret": "gateway", "edgeTlsSecret": "edge", "apiKeysSecret": {"name": "keys"}},
            "target": {"tlsSecret": "target"},
            "draft": {"tlsSecret": "draft"},
        },
    },
    "policies": {"on": {}, "off": {"networkPolicy": {"enabled": False}}},
    "monitoring": {"off": {}, "on": MONITORING},
}
"""Values by topic and choice."""
REFUSED = {"machines": "cpu", "engine": "vllm", "ray": "on"}
"""Choices that the chart refuses together."""


def combinations() -> Iterator[tuple[str, Values]]:
    """Name and values of each combination."""
    for chosen in product(*CHOICES.values()):
        named = dict(zip(CHOICES, chosen, strict=True))
        if not REFUSED.items() <= named.items():
            name = " ".join(f"{what}={choice}" for what, choice in named.items())
            yield name, merged(*(CHOICES[what][choice] for what, choice in named.items()))


def main() -> int:
    if find_spec("helm_python") is None:
        sys.exit("helm-python-sdk is not installed: run `make setup`, on Linux with x86_64, macOS or Windows")
    started = time.perf_counter()
    distinct: dict[str, str] = {}
    """The kind of each object, by its content: most objects are the same in many combinations."""
    every = dict(combinations())
    objects = command_lines = 0
    for name, values in every.items():
        rendered = render(values)
        print(f"{name}: {len(rendered)} objects", file=sys.stderr)
        for document in rendered:
            content = json.dumps(document, sort_keys=True)
            if content not in distinct:
                command_lines += check(document)
            distinct[content] = document["kind"]
        objects += len(rendered)
    kinds = Counter(distinct.values())
    summary = {
        "combinations": len(every),
        "objects": objects,
        "distinct_objects": kinds.total(),
        "kinds": dict(sorted(kinds.items())),
        "command_lines": command_lines,
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
