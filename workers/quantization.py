"""The quantisation of a checkpoint (`quantization_config`), and the format that it is served in.

Supports six published schemes: compressed-tensors, AWQ, GPTQ, bitsandbytes' NF4, FP8 in blocks and
MXFP4. Any other scheme is refused by name here, before a byte of a weight is read. Loads no torch.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from penstock.workers.config import Int4Activations, ModelOptions
from penstock.workers.errors import ConfigError

QuantizedFormat = Literal["int8", "int4", "nf4", "fp8"]
QUANTIZED_FORMATS: tuple[QuantizedFormat, ...] = ("int8", "int4", "nf4", "fp8")
# 8-bit codes in groups, of GGUF files and GPTQ; E4M3 in groups; E2M1 in groups.
StoredFormat = QuantizedFormat | Literal["int8g", "fp8g", "mxfp4"]
METHODS = ("compressed-tensors", "awq", "gptq", "bitsandbytes", "fp8", "mxfp4")
STEP_GROUPS = (16, 32, 64, 128)
TRANSFORM_BLOCK = 64  # as kernels.quant.HADAMARD_BLOCK
MXFP4_GROUP = 32  # as kernels.quant.MXFP4_GROUP
STEPS_KEY = "penstock_int4"  # of config.json: int8 codes that are 4-bit codes in steps
REMEDY = "serve the original checkpoint with --weights int8, int4, nf4 or fp8"


@dataclass(frozen=True, slots=True)
class StoredScheme:
    """How a checkpoint stores its quantised weights.

    `formats`: those that occur, the main one first. `groups`: sizes of int4 groups that occur; None
    is a whole row. `block_rows`: rows that share an fp8g scale. `has_zeros`: groups have zero
    points beside their scales, as far as the configuration tells. `zero_offset`: added to
    stored zero points (GPTQ's first version stores them one too low). `ignore`: modules that are
    not quantised, names, names with "*", or "re:" patterns. `not_transformed`: modules whose
    weights are not Hadamard transforms, likewise; None: none is one.
    """

    method: str
    formats: tuple[StoredFormat, ...]
    groups: tuple[int | None, ...] = ()
    zero_offset: int = 0
    ignore: tuple[str, ...] = ()
    step_group: int | None = None
    int8_modules: frozenset[str] = frozenset()
    not_transformed: tuple[str, ...] | None = None
    block_rows: int = 1
    has_zeros: bool = False

    def ignores(self, module: str) -> bool:
        """Whether `module` is on the list: by its name, the last parts of it, or a pattern."""
        return _is_listed(module, self.ignore)

    def is_transformed(self, module: str) -> bool:
        """Whether the stored weight is the Hadamard transform of the module's."""
        return self.not_transformed is not None and not _is_listed(module, self.not_transformed)

    def is_opened(self, weights: str) -> bool:
        """Whether `weights` takes the codes apart: for plain numbers, or, of a GGUF file, for codes
        of another format."""
        if weights in QUANTIZED_FORMATS:
            return self.method == "gguf" and self.formats[0] != weights
        return weights != "auto"


@dataclass(frozen=True, slots=True)
class Int4Options:
    """`group`: inputs of int4 weights, rounded at load, that share a step and an offset.
    `activations` of int4 weights: rounded to int8 in groups; plain: as they are; auto: plain for
    stored weights only."""

    group: int = 16  # as kernels.quant.INT4_STEP_GROUP
    activations: Int4Activations = "auto"


INT4 = Int4Options()


def int4_options(settings: ModelOptions) -> Int4Options:
    return Int4Options(int(settings.int4_group), settings.int4_activations)


def is_wide(layer: int, num_layers: int) -> bool:
    """Whether a layer lies in the first or the last eighth, or is every third between. llama.cpp's
    Q4_K_M stores v and down of these layers with more bits (`use_more_bits` in llama-quant.cpp)."""
    eighth = num_layers // 8
    is_outer = layer < eighth or layer >= 7 * num_layers // 8
    return is_outer or (layer - eighth) % 3 == 2


def head_format(format: StoredFormat) -> QuantizedFormat:
    """Of a quantised head, where the linear layers are in `format`: int8 beside int4 and codes of
    files, because an error of the head goes into every token unmended."""
    if format == "int8" or format == "nf4" or format == "fp8":
        return format
    return "int8"


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Which weights are quantised at load, and how. `format` None: no linear layers; `head` None:
    not the head.

    Embeddings, norms, biases and routers are never quantised. `int8_group`: inputs of int8 weights,
    stored ones too, whose activations share a scale; None: a whole row. `wide_layers`: beside int4
    whose activations are rounded, q, k, v and down of the layers that `is_wide` are int8.
    """

    format: QuantizedFormat | None = None
    quantize_o: bool = True
    head: QuantizedFormat | None = None
    int8_group: int | None = 64  # as kernels.quant.INT8_GROUP
    int4: Int4Options = INT4
    wide_layers: bool = False

    def of_sensitive(self, layer: int, num_layers: int) -> QuantizedFormat | None:
        """The format of a layer's q, k and v projections, and of its down projection outside of
        routed experts."""
        is_rounded = self.format == "int4" and self.int4.activations != "plain"
        if is_rounded and self.wide_layers and is_wide(layer, num_layers):
            return "int8"
        return self.format

    def of_o(self) -> QuantizedFormat | None:
        """The format of attention's output projections."""
        return self.format if self.quantize_o else None


def weight_plan(
    scheme: StoredScheme | None,
    weights: str,
    quantize_o: bool = True,
    quantize_lm_head: bool = False,
) -> WeightPlan:
    """What is quantised at load. Raises ConfigError for a checkpoint in another format.

    A head that a quantised checkpoint has in plain numbers is quantised beside its codes, if they
    stay codes."""
    if weights in QUANTIZED_FORMATS and (scheme is None or scheme.is_opened(weights)):
        head = head_format(weights) if quantize_lm_head else None
        return WeightPlan(weights, quantize_o, head)
    if scheme is None or scheme.is_opened(weights):
        return WeightPlan()
    if weights != "auto" and scheme.method != "gguf" and scheme.formats != (weights,):
        raise ConfigError(
            f"weights is {weights}, but this checkpoint is quantised as "
            f"{' and '.join(scheme.formats)} already; serve it with weights auto, or give the "
            "original checkpoint"
        )
    return WeightPlan(head=head_format(scheme.formats[0]) if quantize_lm_head else None)


NEURON_COPIES = ("int8", "int4")  # weights whose experts may have copies by neurons


def check_neurons(
    scheme: StoredScheme | None, weights: str, who: str, *, has_copies: bool = False
) -> None:
    """Raise ConfigError unless experts are to be had by neurons. `who`: what needs that, for the
    message; `has_copies`: copies by neurons in int8 or int4 do.

    Codes of a quantised down matrix share scales across neurons, so neurons in codes are copies of
    the original's; a checkpoint that is stored quantised has no original.
    """
    if scheme is not None:
        raise ConfigError(
            f"{who} needs the single neurons of experts, and this checkpoint is quantised, so its "
            "experts are loaded whole: leave it out, or give the original checkpoint"
        )
    if weights in QUANTIZED_FORMATS and not (has_copies and weights in NEURON_COPIES):
        also = f" ({' or '.join(NEURON_COPIES)}, too)" if has_copies else ""
        raise ConfigError(
            f"{who} needs the single neurons of experts, and weights is {weights}, whose experts "
            f"are loaded whole: leave one of them out, or choose weights auto, fp32 or bf16"
            f"{also}"
        )


def _is_listed(module: str, names: tuple[str, ...]) -> bool:
    for each in names:
        if each.startswith("re:"):
            if re.match(each[3:], module):
                return True
        elif "*" in each:
            if fnmatch.fnmatchcase(module, f"*{each}*"):
                return True
        elif module == each or module.endswith("." + each) or f".{each}." in f".{module}.":
            return True
    return False


def read_scheme(config: Mapping[str, Any]) -> StoredScheme | None:
    """The scheme of a config.json by its `quantization_config`; None where there is none.

    Raises ConfigError, naming what is not supported and the remedy.
    """
    stated, steps = config.get("quantization_config"), config.get(STEPS_KEY)
    if not stated:
        return None
    if not isinstance(stated, Mapping):
        raise ConfigError(f"quantization_config must be an object; got {stated!r}")
    method = stated.get("quant_method")
    readers = {
        "compressed-tensors": _compressed_tensors,
        "awq": _awq,
        "gptq": _gptq,
        "bitsandbytes": _bitsandbytes,
        "fp8": _fp8_blocks,
        "mxfp4": _mxfp4,
    }
    if method not in readers:
        raise _refused(f"method {method!r} is not supported; supported are {', '.join(METHODS)}")
    try:
        found = readers[method](stated)
        return found if steps is None else _in_steps(found, steps)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"quantization_config is unusable: {error!r}") from error


def _compressed_tensors(stated: Mapping[str, Any]) -> StoredScheme:
    sparsity = stated.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise _refused(f"sparsity format {sparsity['format']!r} is not supported")
    formats: list[QuantizedFormat] = []
    groups: list[int | None] = []
    for name, group in (stated.get("config_groups") or {}).items():
        if not isinstance(group, Mapping):
            raise _refused(f"config group {name!r} is a preset by name, which is not supported")
        found = _format_of_group(name, group)
        formats.append(found)
        if found == "int4":
            weights = group["weights"]
            is_grouped = weights["strategy"] == "group"
            groups.append(_checked_group(weights["group_size"]) if is_grouped else None)
    if not formats:
        raise _refused("no config_groups, which describe how the weights are stored")
    ignore = tuple(str(each) for each in stated.get("ignore") or ())
    described = [group["weights"] for group in stated["config_groups"].values()]
    return StoredScheme(
        "compressed-tensors", _once(formats), _once(groups), 0, ignore,
        has_zeros=any(not each.get("symmetric", True) for each in described),
        not_transformed=_not_transformed(stated, formats),
    )  # fmt: skip


def _not_transformed(
    stated: Mapping[str, Any], formats: list[QuantizedFormat]
) -> tuple[str, ...] | None:
    """Where activations go through a transform at each step: what is left out of it. Transforms of
    weights alone are in the stored ones already."""
    if stated.get("transforms_config"):
        raise _refused("transforms in an early form (transforms_config) are not supported")
    found: list[str] | None = None
    for name, scheme in ((stated.get("transform_config") or {}).get("config_groups") or {}).items():
        for part in scheme["apply"]:
            place = str(part["location"])
            if place in ("weight_input", "weight_output"):
                continue
            what = f"transform {name!r} of {place}"
            if place != "input":
                raise _refused(f"{what} is not supported; of input it is")
            if scheme["type"] != "hadamard" or scheme.get("randomize"):
                raise _refused(f"{what}, random or not of Hadamard, is not supported")
            if scheme.get("head_dim") != TRANSFORM_BLOCK:
                raise _refused(f"{what} in blocks other than {TRANSFORM_BLOCK} is not supported")
            if part["targets"] != ["Linear"] or found is not None or set(formats) != {"int8"}:
                raise _refused(f"{what} is supported for all linear layers in int8")
            ignore = part.get("ignore") or []
            found = [ignore] if isinstance(ignore, str) else [str(each) for each in ignore]
    return None if found is None else tuple(found)


def _in_steps(scheme: StoredScheme, steps: Mapping[str, Any]) -> StoredScheme:
    """As `penstock quantize --to int4 --grid steps` writes it."""
    if scheme.formats != ("int8",):
        raise _refused(f"{STEPS_KEY} is of int8 weights, and these are {scheme.formats}")
    group, wide = int(steps["group_size"]), frozenset(map(str, steps.get("int8_modules") or ()))
    if group not in STEP_GROUPS:
        raise _refused(f"{STEPS_KEY}: group_size is {group}, none of {STEP_GROUPS}")
    formats: tuple[StoredFormat, ...] = ("int4", "int8") if wide else ("int4",)
    return replace(scheme, formats=formats, step_group=group, int8_modules=wide)


def _format_of_group(name: str, group: Mapping[str, Any]) -> QuantizedFormat:
    weights, inputs = group["weights"], group.get("input_activations")
    bits, kind, strategy = weights["num_bits"], weights.get("type", "int"), weights.get("strategy")
    what = f"config group {name!r}: {bits}-bit {kind} weights with strategy {strategy!r}"
    if weights.get("actorder") == "group":
        raise _refused(f"config group {name!r}: activation ordering (actorder) is not supported")
    if group.get("output_activations"):
        raise _refused(f"config group {name!r}: quantised output activations are not supported")
    if kind == "int" and bits == 4 and strategy in ("group", "channel"):
        return "int4"
    if bits == 8 and kind in ("int", "float") and strategy in ("channel", "tensor"):
        if not weights.get("symmetric", True):
            raise _refused(f"{what}, asymmetric, are not supported")
        if inputs is None or inputs.get("num_bits") != 8 or inputs.get("type", "int") != kind:
            raise _refused(f"{what} are supported with 8-bit {kind} activations only")
        return "int8" if kind == "int" else "fp8"
    raise _refused(f"{what} are not supported")


def _awq(stated: Mapping[str, Any]) -> StoredScheme:
    bits = stated.get("bits", stated.get("w_bit"))
    version = str(stated.get("version", stated.get("format", "gemm"))).lower()
    if bits != 4:
        raise _refused(f"AWQ with {bits} bits is not supported; 4 bits are")
    if version != "gemm":
        raise _refused(f"AWQ version {version!r} is not supported; 'gemm' is")
    return StoredScheme(
        "awq", ("int4",), (_group(stated, "q_group_size"),), 0, _not_converted(stated),
        has_zeros=bool(stated.get("zero_point", True)),
    )  # fmt: skip


def _gptq(stated: Mapping[str, Any]) -> StoredScheme:
    bits = stated.get("bits")
    if bits not in (4, 8):
        raise _refused(f"GPTQ with {bits} bits is not supported; 4 and 8 bits are")
    if stated.get("dynamic"):
        raise _refused("GPTQ with settings of single modules ('dynamic') is not supported")
    layout = stated.get("checkpoint_format", stated.get("format", "gptq"))
    if layout not in ("gptq", "gptq_v2"):
        raise _refused(f"GPTQ's checkpoint_format {layout!r} is not supported; 'gptq' is")
    offset = 1 if layout == "gptq" else 0
    format: StoredFormat = "int4" if bits == 4 else "int8g"
    return StoredScheme(
        "gptq", (format,), (_group(stated),), offset, _not_converted(stated),
        has_zeros=not stated.get("sym", True),
    )  # fmt: skip


def _fp8_blocks(stated: Mapping[str, Any]) -> StoredScheme:
    """As DeepSeek V3, Qwen3's FP8 files and MiniMax M2 have it."""
    kind, block = str(stated.get("fmt", "e4m3")), stated.get("weight_block_size")
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise _refused(f"FP8 of type {kind!r} is not supported; 'e4m3' is")
    if block is None:
        raise _refused("FP8 without blocks (weight_block_size) is not supported")
    num_rows, width = (int(each) for each in block)
    if num_rows < 1 or width < 16 or width % 16:
        raise _refused(f"FP8 blocks of {list(block)} are not supported; [128, 128] are")
    ignore = (*_not_converted(stated), *map(str, stated.get("ignored_layers") or ()))
    return StoredScheme("fp8", ("fp8g",), (width,), ignore=ignore, block_rows=num_rows)


def _mxfp4(stated: Mapping[str, Any]) -> StoredScheme:
    """As gpt-oss has its experts."""
    return StoredScheme("mxfp4", ("mxfp4",), (MXFP4_GROUP,), ignore=_not_converted(stated))


def _bitsandbytes(stated: Mapping[str, Any]) -> StoredScheme:
    if not stated.get("load_in_4bit", stated.get("_load_in_4bit")):
        raise _refused("bitsandbytes' 8-bit weights (LLM.int8 with outliers) are not supported")
    kind = stated.get("bnb_4bit_quant_type", "fp4")
    if kind != "nf4":
        raise _refused(f"bitsandbytes' type {kind!r} is not supported; 'nf4' is")
    storage = stated.get("bnb_4bit_quant_storage", "uint8")
    if storage != "uint8":
        raise _refused(f"bitsandbytes' storage {storage!r} is not supported; 'uint8' is")
    ignore = tuple(str(each) for each in stated.get("llm_int8_skip_modules") or ())
    return StoredScheme("bitsandbytes", ("nf4",), ignore=ignore)


def _group(stated: Mapping[str, Any], other: str = "group_size") -> int | None:
    return _checked_group(stated.get("group_size", stated.get(other, 128)))


def _checked_group(value: Any) -> int | None:
    size = int(value)
    if size == -1:
        return None
    if size < 8:
        raise _refused(f"groups of {size} weights are not supported; the smallest is 8")
    return size


def _not_converted(stated: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(each) for each in stated.get("modules_to_not_convert") or ())


def _once(values: list[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(values))


def _refused(why: str) -> ConfigError:
    return ConfigError(f"this checkpoint's quantisation cannot be read: {why}; {REMEDY}")
