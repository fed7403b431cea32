"""The argument structs of the native library: named fields, of which the packed formats are made.

Every function of the library takes one pointer to a struct of 8-byte fields. Each struct is listed
here, field by field, and again in C++ (`LAYOUT` in csrc, where the compiler supplies the
offsets); `declare` compares the two when the library is loaded. If a field was added, removed,
moved or given another type on one side only, that is a LayoutError, and no function is ever called.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from typing import Any

FIELD_BYTES = 8


class LayoutError(Exception):
    """An argument struct of the library differs from the one that Python packs."""


class Arguments:
    """One argument struct: `fields` in order, separated by spaces; a double ends in ":d"."""

    def __init__(self, fields: str):
        self.fields = tuple(fields.split())
        self.format = struct.Struct("".join("d" if f.endswith(":d") else "q" for f in self.fields))
        self.pack = self.format.pack  # 0.4 microseconds, where twenty ctypes arguments take 3.3

    def layout(self) -> str:
        """As the library describes it: "name:offset:type,...", type d or q (integer, pointer)."""
        return ",".join(
            f"{name}:{i * FIELD_BYTES}:{kind or 'q'}"
            for i, (name, _, kind) in enumerate(field.partition(":") for field in self.fields)
        )


def _side(name: str) -> str:
    """K or V of a paged cache."""
    fields = ("blocks", "stride", "scales", "scale_stride", "scratch", "scratch_stride",
              "scratch_scales", "scratch_scale_stride")  # fmt: skip
    return " ".join(f"{name}.{field}" for field in fields)


def _cache(name: str) -> str:
    sizes = ("num_blocks", "block_size", "kv_heads", "dim", "format", "group")
    return " ".join((_side(f"{name}.k"), _side(f"{name}.v"), *(f"{name}.{s}" for s in sizes)))


def _prefixed(name: str, fields: str) -> str:
    return " ".join(f"{name}.{field}" for field in fields.split())


_INT8 = "int8.codes int8.stride int8.scales int8.group int8.hadamard"
_WRITE = f"dtype k k_stride v v_stride {_cache('cache')} slots tokens threads"

PACK = Arguments("dtype weight weight_stride packed columns depth threads")
LINEAR = Arguments("dtype x x_stride packed bias out out_stride rows columns depth threads")
PACK_INT8 = Arguments("codes stride packed columns depth threads")
LINEAR_INT8 = Arguments(
    "dtype x x_stride x_scales packed scales bias out out_stride rows columns depth group threads "
    "steps offsets weight_group hadamard"
)
PACK_INT4 = Arguments("codes stride packed columns depth threads")
SEARCH_INT4 = Arguments("weight stride scales codes steps offsets rows depth group threads")
LINEAR_INT4_GROUPS = Arguments(
    "dtype x x_stride x_scales packed scales zeros minimums bias out out_stride rows columns depth "
    "group weight_group threads"
)
PACK_CODES = Arguments("run codes stride packed columns depth group threads")
LINEAR_CODES = Arguments(
    "dtype x x_stride packed table scales shifts bias out out_stride rows columns depth group "
    "threads bits"
)
WRITE_KV = Arguments(_WRITE)
ROPE_WRITE_KV = Arguments(f"{_prefixed('write', _WRITE)} q q_stride heads cos sin half")
ATTENTION = Arguments(
    f"dtype q q_stride {_cache('cache')} tables table_stride starts lens out batch heads scale:d "
    "softcap:d window threads q_sink q_sink_stride sink_ends window_starts sink_blocks bases "
    "sink_scores"
)
RMS_NORM = Arguments(
    "dtype x x_token_stride x_head_stride residual residual_stride weight post factor:d wide out "
    f"out_token_stride out_head_stride sum tokens heads dim eps:d threads {_INT8}"
)
QUANTIZE = Arguments(f"dtype x stride rows dim threads {_INT8}")
ROPE = Arguments("dtype q q_stride k k_stride cos sin tokens heads kv_heads dim half threads")
ROPE_TO = Arguments("dtype q q_stride out out_stride cos sin tokens heads dim half threads")
ACT_MUL = Arguments(f"dtype gate_up stride out out_stride rows dim activation threads {_INT8}")
SOFT_CAP = Arguments("x stride rows dim cap:d threads")
SWIGLU = Arguments("dtype gate_up stride out out_stride rows dim alpha:d limit:d threads")
HADAMARD = Arguments("dtype x stride out rows dim threads")
COMBINE = Arguments("dtype rows places weights out tokens ranks dim threads")
UNPACK_NEURONS = Arguments("dtype rows row_stride places count gate_up down hidden inner")
NEURON_MLP = Arguments(
    "dtype x x_stride pool row_bytes format places ends sums so_far begins is_last out out_stride "
    "tokens dim threads"
)
DELTA = Arguments(
    "dtype mixed mixed_stride z z_stride ba ba_stride conv decay dt_bias norm eps:d last "
    "last_stride state state_stride starts sources write_starts write_after write_slots out "
    "out_stride sequences taps key_heads value_heads key_dim value_dim threads"
)
GATE_MUL = Arguments("dtype x x_stride gate gate_stride rows dim threads")
GATHER = Arguments(
    "own own_stride own_bytes shared at all_bytes out out_stride rows arrived calls rank ranks"
)
SAMPLE = Arguments(
    "dtype logits stride rows vocab inverse_temperature top_k top_p min_p uniform scratch ids "
    "threads"
)
INDEX_TEXT = Arguments("tokens heads before short_heads capacity head_bits begin end")
MATCH_TEXT = Arguments(
    "tokens heads before short_heads capacity head_bits end newest num_newest is_own out most found"
)
RUN = Arguments("calls count")

OPERATORS: Mapping[str, Arguments] = {  # exported as pk_<name>; replay.py records their calls
    "pack": PACK,
    "linear": LINEAR,
    "pack_int8": PACK_INT8,
    "linear_int8": LINEAR_INT8,
    "pack_int4": PACK_INT4,
    "search_int4": SEARCH_INT4,
    "linear_int4_groups": LINEAR_INT4_GROUPS,
    "pack_codes": PACK_CODES,
    "linear_codes": LINEAR_CODES,
    "write_kv": WRITE_KV,
    "rope_write_kv": ROPE_WRITE_KV,
    "decode": ATTENTION,
    "prefill": ATTENTION,
    "rms_norm": RMS_NORM,
    "quantize": QUANTIZE,
    "rope": ROPE,
    "rope_to": ROPE_TO,
    "act_mul": ACT_MUL,
    "soft_cap": SOFT_CAP,
    "swiglu": SWIGLU,
    "combine": COMBINE,
    "hadamard": HADAMARD,
    "unpack_neurons": UNPACK_NEURONS,
    "neuron_mlp": NEURON_MLP,
    "sample": SAMPLE,
    "delta": DELTA,
    "gate_mul": GATE_MUL,
    "gather": GATHER,
}
FUNCTIONS: Mapping[str, Arguments] = {
    **OPERATORS,
    "run": RUN,
    "index_text": INDEX_TEXT,
    "match_text": MATCH_TEXT,
}


def declare(library: Any) -> None:
    """Give each function of `library` its ctypes signature, and compare its argument struct.

    Raises AttributeError if a function is missing, and LayoutError if a struct differs.
    """
    for name, arguments in FUNCTIONS.items():
        function = getattr(library, f"pk_{name}")
        function.argtypes, function.restype = [ctypes.c_char_p], None
        describe = getattr(library, f"pk_layout_{name}")
        describe.argtypes, describe.restype = [], ctypes.c_char_p
        check(name, arguments, describe().decode())


def check(name: str, arguments: Arguments, compiled: str) -> None:
    """Raises LayoutError unless `compiled`, the library's description, is that of `arguments`."""
    packed = arguments.layout()
    if packed == compiled:
        return
    ours, theirs = packed.split(","), compiled.split(",")
    pairs = [(a, b) for a, b in zip(ours, theirs) if a != b]
    first = (
        "Python packs {} where C++ reads {}".format(*pairs[0])
        if pairs
        else f"Python packs {len(ours)} fields and C++ reads {len(theirs)}"
    )
    raise LayoutError(
        f"the arguments of pk_{name} differ between kernels/cpu/arguments.py and csrc: {first} "
        "(name:offset:type)"
    )
