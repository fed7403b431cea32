"""The argument structs: Python and C++ agree field by field, or the library is refused."""

from __future__ import annotations

import ctypes
import shutil
import struct
from pathlib import Path

import pytest

from penstock.kernels.cpu import arguments, native
from penstock.kernels.cpu.arguments import FUNCTIONS, Arguments, LayoutError

HEADER = native.FOLDER / "export.h"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_fields_are_named_once_and_packed_at_their_offsets(name):
    fields = FUNCTIONS[name].fields
    assert len(set(fields)) == len(fields)
    values = list(range(1, len(fields) + 1))
    packed = FUNCTIONS[name].pack(*values)
    assert len(packed) == arguments.FIELD_BYTES * len(fields)
    for entry, value in zip(FUNCTIONS[name].layout().split(","), values, strict=True):
        _, offset, kind = entry.split(":")
        assert struct.unpack_from(kind, packed, int(offset)) == (value,)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_difference_in_any_field_is_refused(name, native_path, monkeypatch):
    """Each field in turn missing, added, renamed, of another type, and swapped with the next."""
    library, fields = native.loaded(), list(FUNCTIONS[name].fields)
    arguments.declare(library)
    for i, field in enumerate(fields):
        other = field.removesuffix(":d") if field.endswith(":d") else f"{field}:d"
        poisoned = [
            fields[:i] + fields[i + 1 :],
            [*fields[:i], "poison", *fields[i:]],
            [*fields[:i], "poison", *fields[i + 1 :]],
            [*fields[:i], other, *fields[i + 1 :]],
        ]
        if i + 1 < len(fields):
            poisoned.append([*fields[:i], fields[i + 1], field, *fields[i + 2 :]])
        for each in poisoned:
            monkeypatch.setattr(
                arguments, "FUNCTIONS", {**FUNCTIONS, name: Arguments(" ".join(each))}
            )
            with pytest.raises(LayoutError, match=f"pk_{name} differ"):
                arguments.declare(library)


def test_a_library_with_other_arguments_is_not_loaded(native_path, monkeypatch):
    """The error reaches the caller: plain PyTorch must not hide a mistake of ours."""
    swapped = Arguments("count calls")
    monkeypatch.setattr(arguments, "FUNCTIONS", {**FUNCTIONS, "run": swapped})
    with pytest.raises(LayoutError, match="Python packs count:0:q where C\\+\\+ reads calls:0:q"):
        native.loaded.__wrapped__()


SMALL = """
#include "export.h"
struct Args { FIELDS };
LAYOUT(Args, LIST)
EXPORT const char* layout() { return describe<Args>(); }
"""


def compile_small(folder: Path, fields: str, names: str) -> ctypes.CDLL:
    text = SMALL.replace("FIELDS", fields).replace(
        "LIST", " ".join(f"FIELD({n})" for n in names.split())
    )
    source, target = folder / "small.cpp", folder / "small.so"
    source.write_text(text)
    shutil.copy(HEADER, folder)
    compiler = native.find_compiler()
    assert compiler is not None
    native._run_all([[compiler, *native.FLAGS, "-shared", str(source), "-o", str(target)]])
    library = ctypes.CDLL(str(target))
    library.layout.restype = ctypes.c_char_p
    return library


def test_a_struct_that_was_reordered_in_cpp_is_refused(native_path, tmp_path):
    """The compiler's offsets are compared, so a list that was left as it was does not help."""
    good = "int64_t a; const float* b; double c;"
    (tmp_path / "good").mkdir(), (tmp_path / "swapped").mkdir()
    packed = Arguments("a b c:d")
    arguments.check("f", packed, compile_small(tmp_path / "good", good, "a b c").layout().decode())
    swapped = "const float* b; int64_t a; double c;"
    described = compile_small(tmp_path / "swapped", swapped, "a b c").layout().decode()
    with pytest.raises(LayoutError, match="packs a:0:q where C\\+\\+ reads a:8:q"):
        arguments.check("f", packed, described)


@pytest.mark.parametrize(
    ("fields", "names", "message"),
    [
        ("int64_t a; int64_t b;", "a", "a field is not listed"),
        ("int64_t a; int b; int c;", "a b c", "has 8 bytes"),
    ],
)
def test_the_compiler_refuses_a_list_that_is_not_the_struct(
    native_path, tmp_path, fields, names, message
):
    with pytest.raises(native.BuildError, match=message):
        compile_small(tmp_path, fields, names)
