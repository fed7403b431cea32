"""Finds asserts that check something: `python -O` leaves them out.

    python -m tools.find_asserts

In deployments/, workers/ and kernels/ an assert may tell the type checker what a value is (`x is
not None`, `isinstance(x, T)`): where it does not hold, the next line fails without it. Other
asserts are allowed in the files of LISTED only, each for a reason. Whatever a client, a file or
another process decides must be an `if` that raises an error of its own.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("deployments", "workers", "kernels")
_SHAPES = "shapes and dtypes of tensors that this package makes itself; checked at each operator"
_CHECKED = "a method that checks invariants, for tests and idle time"
_CALLERS = "what its callers in this package guarantee, and no data decides"
LISTED: Mapping[str, str] = {
    "kernels/": _SHAPES,
    "workers/engine/engine.py": _CHECKED,
    "workers/experts/slots.py": _CHECKED,
    "workers/memory/block_pool.py": _CHECKED,
    "workers/memory/host_tier.py": _CHECKED,
    "workers/memory/state_slots.py": _CHECKED,
    "workers/scheduling/states.py": _CHECKED,
    "workers/context_policy.py": "the values of a ContextSettings, which has checked them",
    "workers/experts/cache.py": _CALLERS,
    "workers/experts/neurons/places.py": _CHECKED,
    "workers/experts/neurons/pool.py": _CALLERS,
    "workers/experts/neurons/scores.py": _CALLERS,
    "workers/memory/arena.py": _CALLERS,
    "workers/memory/restore.py": _CALLERS,
    "workers/model_config.py": "both lists are made for num_layers, by `from_dict`",
    "workers/models/rope.py": "RopeConfig has refused other types",
    "workers/parameters.py": "of a dataclass in this package, when it is imported",
    "workers/planning/roofline.py": _CALLERS,
    "workers/scheduling/swap.py": _CALLERS,
    "workers/weights/sources.py": _CALLERS,
}


def checking_asserts(source: str) -> list[int]:
    """Lines of the asserts that do more than to tell the type checker what a value is."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assert) and not _is_narrowing(node.test)
    ]


def _is_narrowing(test: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return all(map(_is_narrowing, test.values))
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return isinstance(test.operand, ast.Call) and _is_type_check(test.operand)
    if isinstance(test, ast.Call):
        return _is_type_check(test)
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.Is | ast.IsNot)
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value is None
    )


def _is_type_check(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in ("isinstance", "callable")


def sources() -> Iterator[tuple[str, str]]:
    """Path from the root, and text, of every file that is looked at."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def problems(files: Iterable[tuple[str, str]], listed: Mapping[str, str] = LISTED) -> list[str]:
    """A line for each assert that is not allowed, and for each entry of the list without one."""
    found, used = [], set()
    for name, source in files:
        lines = checking_asserts(source)
        entry = next((each for each in listed if name.startswith(each)), None)
        if lines and entry is not None:
            used.add(entry)
        elif lines:
            found += [f"{name}:{line}: an assert that checks; raise an error" for line in lines]
    unused = [f"tools/find_asserts.py: {each} has no such assert" for each in listed.keys() - used]
    return found + sorted(unused)


def main() -> None:
    found = problems(sources())
    print("\n".join(found) if found else "no assert checks what another process decides")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
