"""Every combination of the chart's main values; `python -m tests.deploy.combinations` (`make chart`) checks them all.

The last line is JSON: numbers of combinations and of valid objects by kind.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import product

from tests.deploy import commands
from tests.deploy.helm import Document, Values, merged, on_cpus, rendered
from tests.deploy.pods import complaints, pod_templates
from tests.deploy.validation import check

GPU: Values = {
    "model": {"path": "/models/llama-70b", "claimName": "checkpoints"},
    "speculation": {"method": "draft_model", "model": "/models/llama-1b", "num_speculative_tokens": 6},
}
LOOKUP: Values = {"speculation": {"method": "ngram", "model": None, "beside": []}, "draft": {"enabled": False}}
MONITORING: Values = {"monitoring": {"enabled": True, "labels": {"release": "prometheus"}}}

CHOICES: dict[str, dict[str, Values]] = {
    "machines": {"cpu": on_cpus(), "gpu": GPU},
    "ray": {
        "off": {},
        "on": {
            "target": {
                "replicas": 2,
                "ray": {"enabled": True, "tensorParallelSize": 2, "tokenSecret": {"name": "ray"}},
            }
        },
    },
    "drafts": {"workers": {}, "lookup": LOOKUP},
    "redis": {
        "own": {},
        "password": {"redis": {"passwordSecret": {"name": "redis"}}},
        "external": {"redis": {"enabled": False, "external": {"urlSecret": {"name": "redis"}}}},
    },
    "autoscaling": {
        "none": {},
        "hpa": merged(MONITORING, {"autoscaling": {"kind": "hpa"}}),
        "keda": merged(
            MONITORING, {"autoscaling": {"kind": "keda", "prometheusUrl": "http://prometheus.monitoring:9090"}}
        ),
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


def combinations() -> Iterator[tuple[str, Values]]:
    """Name and values of each combination."""
    for chosen in product(*(choices.items() for choices in CHOICES.values())):
        name = " ".join(f"{what}={choice}" for what, (choice, _) in zip(CHOICES, chosen, strict=True))
        yield name, merged(*(values for _, values in chosen))


def few() -> Iterator[tuple[str, Values]]:
    """Combinations that take every choice once, with the default of all other topics; by the choice's name."""
    cpu = CHOICES["machines"]["cpu"]
    yield "cpu", cpu
    yield "gpu", GPU
    for what, choices in CHOICES.items():
        if what != "machines":
            _plainest, *others = choices
            for choice in others:
                yield (what if len(others) == 1 else choice), merged(cpu, choices[choice])


@dataclass
class Checked:
    """Valid objects. Most objects are the same in many combinations, and are checked once."""

    objects: int = 0
    distinct: dict[str, str] = field(default_factory=dict)
    """The kind of each object, by its content."""
    command_lines: int = 0

    def check(self, document: Document) -> None:
        """Raises a validation error, or exits with the complaint about a pod."""
        self.objects += 1
        content = json.dumps(document, sort_keys=True)
        if content in self.distinct:
            return
        self.distinct[content] = document["kind"]
        check(document)
        for name, template in pod_templates([document]):
            if wrong := list(complaints(template["spec"])):
                sys.exit(f"{name} is not restricted: {', '.join(wrong)}")
            self.command_lines += commands.parsed(template["spec"])


def main() -> int:
    if find_spec("helm_python") is None:
        sys.exit("helm-python-sdk is not installed: run `make setup`, on Linux with x86_64, macOS or Windows")
    started = time.perf_counter()
    every = dict(combinations())
    checked = Checked()
    for name, documents in zip(every, rendered(list(every.values())), strict=True):
        print(f"{name}: {len(documents)} objects", file=sys.stderr)
        for document in documents:
            checked.check(document)
    kinds = Counter(checked.distinct.values())
    summary = {
        "combinations": len(every),
        "objects": checked.objects,
        "distinct_objects": kinds.total(),
        "kinds": dict(sorted(kinds.items())),
        "command_lines": checked.command_lines,
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
