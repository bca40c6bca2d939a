"""Write paceline/v1 from proto/paceline/v1.

python proto/generate.py           bring the stubs up to date (make proto)
python proto/generate.py --check   exit 1 and name what is stale (a test runs this)
"""

import argparse
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
PACKAGE = "paceline/v1"  # below proto/ and below the root alike: import path = path on disk


def compile_protos(out: Path) -> None:
    sources = sorted(str(path.relative_to(PROTO)) for path in (PROTO / PACKAGE).glob("*.proto"))
    well_known = files("grpc_tools") / "_proto"  # google/protobuf/*.proto
    outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{PROTO}", f"-I{well_known}", *outputs, *sources]) != 0:
        sys.exit("protoc refused the contract; its reasons are above")


def stubs(root: Path) -> dict[Path, bytes]:
    return {path.relative_to(root): path.read_bytes() for path in (root / PACKAGE).glob("*_pb2*.py*")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check

    committed = stubs(ROOT)
    with tempfile.TemporaryDirectory() as scratch:
        compile_protos(Path(scratch))
        fresh = stubs(Path(scratch))

    stale = sorted(path for path in committed.keys() | fresh.keys() if committed.get(path) != fresh.get(path))
    if check and stale:
        sys.exit(f"stale, run `make proto`: {', '.join(map(str, stale))}")
    for path in stale:
        if path in fresh:
            (ROOT / path).write_bytes(fresh[path])
        else:
            (ROOT / path).unlink()


if __name__ == "__main__":
    main()
