"""Compiles every Triton kernel to machine code for two generations of GPU, without one.

Run by test_triton.py in a process of its own, where the interpreter is off. Finds what that cannot:
type errors of the compiler, shapes that the tensor cores refuse, too much shared memory.
"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penstock.kernels.triton import attention as attention_triton
from penstock.kernels.triton import attention_kernels as programs
from penstock.kernels.triton import delta as delta_triton
from penstock.kernels.triton import kv_write as kv_triton
from penstock.kernels.triton import rowwise as rowwise_triton

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}  # of one program at most, by compute capability
STRIDES_64 = {
    f"{side}_{name}_stride"
    for side in "kv"
    for name in ("block", "scratch", "scales", "scales_scratch")
}
HEADS = {"NUM_HEADS": 32, "GROUP": 4, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "DIM_TILE": 128}
CACHE = {"q_ptr": "bf16", "k_ptr": "bf16", "v_ptr": "bf16", "tables_ptr": "i32", "lens_ptr": "i32"}
SCRATCH = {"k_scratch_at": "i64", "v_scratch_at": "i64"}
SCALES = {"k_scales_ptr": "fp16", "v_scales_ptr": "fp16"}
SCALES_APART = SCRATCH | {"k_scales_at": "i64", "v_scales_at": "i64"}
EDGES = {"sink_ends_ptr": "i32", "window_starts_ptr": "i32"}
ROLLED = EDGES | {"q_sink_ptr": "bf16", "sink_blocks_ptr": "i32", "bases_ptr": "i32"}
SINKS = {"sink_scores_ptr": "fp32"}
PARTIAL = {"partial_ptr": "fp32", "top_ptr": "fp32", "total_ptr": "fp32"}

WRITE = dict.fromkeys(("k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr"), "bf16")
WRITE["slots_ptr"] = "i64"
ROPE_WRITE = WRITE | {"q_ptr": "bf16", "cos_ptr": "fp32", "sin_ptr": "fp32"}
WRITE_SIZES = {"BLOCK_SIZE": 16, "HEAD_DIM": 128, "HALF": 64, "NUM_HEADS": 32, "HEAD_TILE": 32}
WRITE_SIZES |= {"HALF_TILE": 64, "NUM_GROUPS": 8, "GROUP": 128, "GROUPS_TILE": 8, "GROUP_TILE": 128}
SPLIT_SIZES = {"SPLIT_KEYS": attention_triton.SPLIT}
PLAIN = {"GROUPS": 0, "GROUPS_TILE": 1, "softcap": None}
DECODE_SIZES = HEADS | SPLIT_SIZES | {"ROWS": 16, "KEY_TILE": 64} | PLAIN
MERGE = PARTIAL | {"lens_ptr": "i32", "out_ptr": "bf16"}
MERGE_SIZES = {"NUM_HEADS": 32, "HEAD_DIM": 128, "DIM_TILE": 128} | SPLIT_SIZES
PREFILL = CACHE | {"starts_ptr": "i32", "out_ptr": "bf16"}
PREFILL_SIZES = HEADS | SPLIT_SIZES | {"QUERY_TILE": 128, "KEY_TILE": 64} | PLAIN
ROPE = {"x_ptr": "bf16", "cos_ptr": "fp32", "sin_ptr": "fp32", "out_ptr": "bf16"}
ROPE_SIZES = {"HEADS": 32, "HEAD_DIM": 128, "HALF": 64, "HEAD_TILE": 32, "HALF_TILE": 64}

DELTA = {
    **dict.fromkeys(("mixed_ptr", "z_ptr", "ba_ptr", "last_ptr", "out_ptr"), "bf16"),
    **dict.fromkeys(("conv_ptr", "decay_ptr", "dt_bias_ptr", "norm_ptr", "state_ptr"), "fp32"),
    **dict.fromkeys(("starts_ptr", "sources_ptr", "write_starts_ptr"), "i32"),
    **dict.fromkeys(("write_after_ptr", "write_slots_ptr"), "i32"),
}
DELTA_SIZES = {  # of Qwen3-Next
    "CHANNELS": 8192, "TAPS": 4, "KEY_HEADS": 16, "VALUE_HEADS": 32, "KEY_DIM": 128,
    "VALUE_DIM": 128, "KEYS": 128, "VALUES": 128,
}  # fmt: skip


def capped(sizes: dict) -> dict:
    """With a soft cap, a number of the launch."""
    return {name: size for name, size in sizes.items() if name != "softcap"}


# kernel, what its pointers point to (others are None), its constants, warps, stages: as launched
# for Llama-3-8B, with and without rolled sequences and scratch blocks
KERNELS = [
    (kv_triton._write_kv_kernel, WRITE, WRITE_SIZES, 4, 3),
    (kv_triton._write_kv_kernel, ROPE_WRITE | SCRATCH, WRITE_SIZES, 4, 3),
    (programs._decode_kernel, CACHE | PARTIAL, DECODE_SIZES, 4, 3),
    (programs._decode_kernel, CACHE | PARTIAL | ROLLED | SCRATCH, DECODE_SIZES, 4, 3),
    (programs._decode_kernel, CACHE | PARTIAL, capped(DECODE_SIZES), 4, 3),
    (programs._prefill_kernel, PREFILL, capped(PREFILL_SIZES), 8, 2),
    (programs._merge_kernel, MERGE, MERGE_SIZES, 1, 3),
    (programs._merge_kernel, MERGE | EDGES, MERGE_SIZES, 1, 3),
    (programs._merge_kernel, MERGE | SINKS, MERGE_SIZES, 1, 3),
    (programs._prefill_kernel, PREFILL, PREFILL_SIZES, 8, 2),
    (programs._prefill_kernel, PREFILL | SINKS, PREFILL_SIZES, 8, 2),
    (programs._prefill_kernel, PREFILL | SCRATCH, PREFILL_SIZES, 8, 2),
    (programs._prefill_kernel, PREFILL | ROLLED | SCRATCH, PREFILL_SIZES, 8, 2),
    (
        rowwise_triton._rms_norm_kernel,
        dict.fromkeys(("x_ptr", "added_ptr", "weight_ptr", "out_ptr", "total_ptr"), "bf16"),
        {"HEADS": 1, "DIM": 4096, "TILE": 4096, "ADD": True, "SCALE": False},
        8,
        3,
    ),
    (
        rowwise_triton._rms_norm_kernel,
        dict.fromkeys(("x_ptr", "added_ptr", "out_ptr", "total_ptr"), "bf16")
        | dict.fromkeys(("weight_ptr", "post_ptr"), "fp32"),
        {"HEADS": 1, "DIM": 4096, "TILE": 4096, "ADD": True, "SCALE": True},
        8,
        3,
    ),
    (rowwise_triton._soft_cap_kernel, {"x_ptr": "fp32"}, {"TILE": 1024}, 4, 3),
    (rowwise_triton._rope_kernel, ROPE, ROPE_SIZES | {"REST_TILE": 0}, 4, 3),
    (rowwise_triton._rope_kernel, ROPE, ROPE_SIZES | {"HALF": 32, "REST_TILE": 64}, 4, 3),
    (
        rowwise_triton._swiglu_kernel,
        {"gate_up_ptr": "bf16", "out_ptr": "bf16"},
        {"TILE": 1024},
        4,
        3,
    ),
    (
        rowwise_triton._act_mul_kernel,
        {"gate_up_ptr": "bf16", "out_ptr": "bf16"},
        {"TILE": 1024, "GELU": False},
        4,
        3,
    ),
    (
        rowwise_triton._act_mul_kernel,
        {"gate_up_ptr": "bf16", "out_ptr": "bf16"},
        {"TILE": 1024, "GELU": True},
        4,
        3,
    ),
    (delta_triton._delta_kernel, DELTA, DELTA_SIZES, 8, 3),
    (delta_triton._gate_mul_kernel, {"x_ptr": "bf16", "gate_ptr": "bf16"}, {"TILE": 1024}, 4, 3),
    (delta_triton._gate_mul_kernel, {"x_ptr": "fp32", "gate_ptr": "fp32"}, {"TILE": 1}, 4, 3),
    (
        rowwise_triton._combine_kernel,
        {"routed_ptr": "bf16", "places_ptr": "i64", "weights_ptr": "fp32", "out_ptr": "bf16"},
        {"RANKS": 8, "TILE": 1024},
        4,
        3,
    ),
]


def quantised(capability: int):
    """The kernels that touch a quantised cache, with 16 scales a key, or one."""
    fp8 = "fp8e4nv" if capability >= 89 else "u8"  # its bits, where a card has no instructions
    int8_cache, fp8_cache = ({"k_ptr": t, "v_ptr": t} | SCALES for t in ("i8", fp8))
    groups, one = {"GROUPS": 16, "GROUPS_TILE": 16}, {"GROUPS": 1, "GROUPS_TILE": 1}
    int8_home, fp8_home = (
        ROPE_WRITE | {"k_cache_ptr": t, "v_cache_ptr": t} | SCALES | SCALES_APART
        for t in ("i8", "u8")
    )
    of_8 = {"NUM_GROUPS": 128, "GROUP": 8, "GROUPS_TILE": 128, "GROUP_TILE": 8}
    decode = CACHE | PARTIAL
    yield programs._decode_kernel, decode | int8_cache | SCALES_APART, DECODE_SIZES | groups, 4, 3
    yield programs._decode_kernel, decode | fp8_cache | ROLLED, DECODE_SIZES | one, 4, 3
    yield programs._prefill_kernel, PREFILL | int8_cache, PREFILL_SIZES | groups, 8, 2
    yield kv_triton._write_kv_kernel, int8_home, WRITE_SIZES | of_8, 4, 3
    yield kv_triton._write_kv_kernel, fp8_home, WRITE_SIZES, 4, 3


# Numbers that Triton finds to be multiples of 16 at a launch with the sizes of a real model.
SIXTEENS = {"inputs_a_piece", "num_inputs", "num_outputs"}


def compile_for(capability: int, kernel, pointers, constants, num_warps: int, num_stages: int):
    optional = {name for name in kernel.arg_names if name.endswith(("_ptr", "_at"))}
    absent = optional - set(pointers)
    constants = constants | dict.fromkeys(absent)

    def type_of(name: str) -> str:
        if name in pointers:
            return pointers[name] if name in SCALES_APART else f"*{pointers[name]}"
        if name in constants:
            return "constexpr"
        if name in ("scale", "eps", "factor", "cap", "softcap", "alpha", "limit"):
            return "fp32"
        return "i64" if name in STRIDES_64 else "i32"

    names = kernel.arg_names
    aligned = [
        i for i, n in enumerate(names) if n in pointers or n.endswith("stride") or n in SIXTEENS
    ]
    source = ASTSource(
        fn=kernel,
        signature={name: type_of(name) for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages}
    if kernel.__module__.endswith(("attention_kernels", "matmul_kernels")):
        options["enable_fp_fusion"] = False  # as they are launched
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


if __name__ == "__main__":
    for capability, most in SHARED_BYTES.items():
        for entry in [*KERNELS, *quantised(capability)]:
            made = compile_for(capability, *entry)
            assert len(made.asm["cubin"]) > 0
            assert made.metadata.shared <= most, (entry[0].__name__, made.metadata.shared)
            print(f"sm_{capability} {entry[0].__name__} shared {made.metadata.shared}")
