"""Generates the Python code of every .proto in this folder, in place: `python protos/generate.py`.

With --check nothing is written; the exit status is 1 if what is there is out of date.
protoc names imports after the proto's own path (`penstock.v1`); ours live under `penstock.protos`,
so the imports, and nothing else, are rewritten. Descriptors keep the names that clients see.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
OURS = re.compile(r"^from (penstock\.|inference )", flags=re.MULTILINE)
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def generate(out: Path) -> list[Path]:
    """The files written, relative to `out`. Raises SystemExit if protoc refuses."""
    import grpc_tools
    from grpc_tools import protoc

    protos = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    arguments = [
        "protoc",
        f"--proto_path={ROOT}",
        f"--proto_path={well_known}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *protos,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc refused; see its message above")
    written = []
    for path in sorted(path for path in out.rglob("*") if path.name.endswith(SUFFIXES)):
        text = path.read_text()
        if path.name.endswith("_grpc.py") and "\nclass " not in text:
            continue  # messages only, no service
        path.write_text(OURS.sub(r"from penstock.protos.\1", text))
        written.append(path.relative_to(out))
    return written


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        written = generate(out)
        fresh = {path: (out / path).read_bytes() for path in written}
    stale = [
        path
        for path, content in fresh.items()
        if not (ROOT / path).exists() or (ROOT / path).read_bytes() != content
    ]
    if arguments == ["--check"]:
        for path in stale:
            print(f"protos/{path} is not what its .proto says; run `make protos`")
        return 1 if stale else 0
    for path in stale:
        (ROOT / path).write_bytes(fresh[path])
        print(f"wrote protos/{path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
