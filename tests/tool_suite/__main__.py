"""`make tool-suite`: the neutral suite `canitoolcall`, replayed through `paceline.parsing`.

A fixture is an output of a model, the tools that were offered, and what a client should get. Each is read as a whole
and in nine kinds of parts. No tokenizer of those models is at hand, so an output's markers are tokens and the rest is
cut into pieces of words. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter

from canitoolcall.results import Status

from tests.tool_suite.replays import OUTCOMES, by_family, cases, reasons


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", default=[], help="only this family of models; may be repeated")
    parser.add_argument("--failures", action="store_true", help="list what did not pass, with the reasons")
    options = parser.parse_args()
    results = list(cases(options.family))
    for case in results if options.failures else []:
        if case.status not in (Status.PASS, Status.UNSUPPORTED):
            print(f"{OUTCOMES[case.status]} {case.fixture_id}", *reasons(case), sep="\n    ")
    families = by_family(results)
    total: Counter[str] = sum(families.values(), Counter())
    report = {
        "fixtures": len(results),
        "supported": len(results) - total["unsupported"],
        **{outcome: total[outcome] for outcome in OUTCOMES.values()},
        "by_family": families,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
