"""Record every head again, with the package itself, into `recorded.json.gz`; tell which differ from those before.

The package gets an environment of its own in `.venv-peers`, 1.5 GB. Exit code 0 and one sentence if pip cannot have it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline_lab.peers.peer_environments import NotInstalledError, python_of
from tests.golden.traces import differences
from tests.speculators_library.recorded import PATH, read, target_network, write

TARGET = "target"


def main() -> int:
    try:
        python = python_of("speculators", Path(".venv-peers"))
    except NotInstalledError as error:
        print(f"Not recorded: {error}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        target_network().save_pretrained(Path(folder) / TARGET)
        argv = [str(python), "-m", "tests.speculators_library.library_process", TARGET, "heads"]
        output = subprocess.run(
            argv, check=True, stdout=subprocess.PIPE, text=True, cwd=folder, env={"PYTHONPATH": str(Path.cwd())}
        )
    recorded = json.loads(output.stdout.splitlines()[-1])
    changed = list(differences(read(), recorded)) if PATH.exists() else []
    write(recorded)
    print(*changed, sep="\n")
    print(
        json.dumps({"speculators": recorded["speculators"], "heads": len(recorded["heads"]), "changed": len(changed)})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
