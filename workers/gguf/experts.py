"""The routed experts of a GGUF file, in the words of a config.json.

A block with routed experts has a router (`ffn_gate_inp`) and all experts of a projection in one
tensor (`ffn_gate_exps`, `ffn_up_exps`, `ffn_down_exps`); other blocks are dense. Where metadata
leaves a size out, as older files do, it is that of the tensors.
"""

from __future__ import annotations

from typing import Any

from penstock.workers.errors import ConfigError
from penstock.workers.gguf.header import GgufHeader
from penstock.workers.gguf.metadata import optional_size, size_of

# Whether the weights of a token's experts sum to one, in files that do not say it.
IS_NORMED = {"llama": True, "qwen2moe": False, "qwen3moe": True}
WITH_SHARED_EXPERT = ("qwen2moe",)
_SOFTMAX = 1  # of expert_gating_func
_DENSE = ("ffn_gate", "ffn_up", "ffn_down")


def routed_experts(header: GgufHeader, name: str) -> dict[str, Any] | None:
    """The attributes of experts in transformers' configuration; None for a dense model.

    `name`: of the architecture. Raises ConfigError, naming the file and the key or tensor, for a
    router of another kind and for tensors that the model would leave unused.
    """
    if optional_size(header, "expert_count") is None and not name.endswith("moe"):
        return None
    count = size_of(header, "expert_count")
    if name not in IS_NORMED:
        raise ConfigError(
            f"{header.file} has routed experts, which a model of architecture {name!r} has not; "
            "give the model's safetensors checkpoint"
        )
    _check_router(header, name)
    num_layers = size_of(header, "block_count")
    dense = [n for n in range(num_layers) if f"blk.{n}.ffn_gate_inp.weight" not in header.tensors]
    routed = sorted(set(range(num_layers)) - set(dense))
    if not routed or (name == "llama" and dense):
        raise ConfigError(
            f"{header.file}: tensor 'blk.{dense[0]}.ffn_gate_inp.weight', a router, is missing"
        )
    _check_tensors(header, name, routed)
    inner = size_of(header, "expert_feed_forward_length", _rows_of_an_expert(header, routed[0]))
    dense_size = optional_size(header, "feed_forward_length")
    return {
        "num_experts": count,
        "num_experts_per_tok": size_of(header, "expert_used_count"),
        "moe_intermediate_size": inner,
        "norm_topk_prob": _is_normed(header, name),
        "shared_expert_intermediate_size": _shared_size(header, name, routed[0]),
        "mlp_only_layers": dense,
        # Of dense blocks; those of Mixtral, which has none, have no size of their own.
        "intermediate_size": inner if name == "llama" else dense_size or inner,
    }


def _check_router(header: GgufHeader, name: str) -> None:
    """Raise ConfigError unless a token goes to the experts with the largest softmax."""
    usual = {
        "expert_gating_func": (0, _SOFTMAX),
        "expert_group_count": (0, 1),
        "expert_weights_scale": (0, 1),
        "expert_shared_count": (0,) if name not in WITH_SHARED_EXPERT else None,
    }
    for key, values in usual.items():
        found = header.metadata.get(f"{name}.{key}", 0)
        if values is not None and found not in values:
            raise ConfigError(
                f"{header.file}: {name}.{key} {found!r} is not supported; give the model's "
                "safetensors checkpoint"
            )


def _check_tensors(header: GgufHeader, name: str, routed: list[int]) -> None:
    """Raise ConfigError for tensors beside the routed experts that the model has no use for."""
    for layer in routed:
        wrong = [f"blk.{layer}.{each}.weight" for each in _DENSE]
        if name not in WITH_SHARED_EXPERT:
            wrong += [f"blk.{layer}.{each}_shexp.weight" for each in (*_DENSE, "ffn_gate_inp")]
        for each in wrong:
            if each in header.tensors:
                raise ConfigError(
                    f"{header.file}: tensor {each!r} beside routed experts is not what a model of "
                    f"architecture {name!r} has"
                )


def _rows_of_an_expert(header: GgufHeader, layer: int) -> int:
    """The inner size of the experts of `layer`, by their tensor [experts, inner, hidden]."""
    tensor = header.tensors.get(f"blk.{layer}.ffn_gate_exps.weight")
    if tensor is not None and len(tensor.shape) == 3:
        return tensor.shape[1]
    if f"blk.{layer}.ffn_gate.0.weight" in header.tensors:
        raise ConfigError(
            f"{header.file} has a tensor for each single expert, as files of early 2024 do; "
            "convert the model again with a current llama.cpp"
        )
    raise ConfigError(
        f"{header.file}: tensor 'blk.{layer}.ffn_gate_exps.weight' is missing, or not the "
        "experts' matrices in one"
    )


def _shared_size(header: GgufHeader, name: str, layer: int) -> int:
    """The inner size of the shared expert; 0: there is none."""
    if name not in WITH_SHARED_EXPERT:
        return 0
    tensor = header.tensors.get(f"blk.{layer}.ffn_gate_shexp.weight")
    default = tensor.shape[0] if tensor is not None and len(tensor.shape) == 2 else None
    return size_of(header, "expert_shared_feed_forward_length", default)


def _is_normed(header: GgufHeader, name: str) -> bool:
    key = f"{name}.expert_weights_norm"
    value = header.metadata.get(key, IS_NORMED[name])
    if type(value) is not bool or (name == "llama" and not value):  # Mixtral always does it
        expected = "true" if name == "llama" else "true or false"
        raise ConfigError(f"{header.file}: {key} is {value!r}; {expected} was expected")
    return value
