"""Record every trace again, into `traces.json.gz`; tell which differ from those that were there."""

from __future__ import annotations

import json

from tests.golden import http, library
from tests.golden.traces import PATH, differences, read, write


def main() -> None:
    traces = {}
    for name, setup, calls in library.calls():
        llm = setup.load()
        traces |= {f"{name}: {each}": call.run(llm) for each, call in calls.items()}
    traces |= http.recorded()
    traces = json.loads(json.dumps(traces))
    changed = list(differences(read(), traces)) if PATH.exists() else []
    write(traces)
    requests = sum(len(trace) if isinstance(trace, list) else 1 for trace in traces.values())
    print(*changed, sep="\n")
    print(json.dumps({"traces": len(traces), "requests": requests, "changed": len(changed)}))


if __name__ == "__main__":
    main()
