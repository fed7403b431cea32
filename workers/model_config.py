"""The model's shape from a checkpoint's config.json or a GGUF file's metadata, as one frozen
dataclass for all families.

Only this module and text/ import transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.workers.errors import ConfigError
from penstock.workers.gguf.config import stated_by, stored_scheme
from penstock.workers.gguf.header import find_gguf, read_header
from penstock.workers.quantization import StoredScheme, read_scheme
from penstock.workers.rope_config import RopeConfig, rope_config
from penstock.workers.stated_config import stated_in_full

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "OlmoeForCausalLM": "olmoe",
}
MAX_JSON_BYTES = 16 * 2**20  # the largest real config.json is some KiB


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape and the switches of one decoder-only model. Sizes count elements, not bytes."""

    architecture: str  # a key of MODEL_TYPES
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of dense layers
    rms_norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    rope: RopeConfig
    sliding_window: tuple[int | None, ...]  # per layer; None: full attention
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = "none"  # "head": over each head; "full": over the whole projection (OLMoE)
    clip_qkv: float | None = None
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False  # normalise the chosen experts' weights to sum to one
    shared_expert_intermediate_size: int = 0  # 0: no shared expert
    moe_layers: tuple[bool, ...] = ()  # per layer: routed experts, or a dense MLP
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "auto"  # "fp32", "bf16", "fp16"; "auto" until the loader has read the headers
    stored_scheme: StoredScheme | None = None  # of a checkpoint that is already quantised

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*sizes, "head_dim", "intermediate_size", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive; got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads ({self.num_heads}) is not a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.rope.rotary_dim % 2 or not 0 < self.rope.rotary_dim <= self.head_dim:
            raise ConfigError(
                f"the rotary dimension must be even and lie in [2, head_dim = {self.head_dim}]; "
                f"got {self.rope.rotary_dim}"
            )
        if any(self.moe_layers) and not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ConfigError(
                f"num_experts_per_token ({self.num_experts_per_token}) must lie in "
                f"[1, num_experts = {self.num_experts}]"
            )
        for window in self.sliding_window:
            if window is not None and window < 1:
                raise ConfigError(f"sliding_window must be positive; got {window}")
        assert len(self.sliding_window) == len(self.moe_layers) == self.num_layers

    @property
    def scale(self) -> float:
        """The factor of q.k before the softmax."""
        return self.head_dim**-0.5

    @classmethod
    def from_pretrained(cls, path: str | Path) -> ModelConfig:
        """Read `path`/config.json (and generation_config.json for further end-of-sequence ids), or
        the GGUF file at `path` or in it.

        Code in a checkpoint (auto_map) is never run. Raises ConfigError for a missing or unusable
        config, and for an architecture that Penstock does not support.
        """
        folder = Path(path)
        if (gguf := find_gguf(folder)) is not None:
            return _from_gguf(gguf)
        stated = read_json(folder / "config.json")
        architecture = _architecture(stated)
        scheme = _scheme(folder, stated)
        hf: Any = stated_in_full(stated) or _of_transformers(folder)
        generation: dict[str, Any] = {}
        if (folder / "generation_config.json").is_file():
            generation = read_json(folder / "generation_config.json")
        try:
            return replace(_from_transformers(architecture, hf, generation), stored_scheme=scheme)
        except ConfigError:
            raise
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{folder / 'config.json'}: unusable setting: {error}") from error


def _from_gguf(file: Path) -> ModelConfig:
    header = read_header(file)
    architecture, stated = stated_by(header)
    config = _from_transformers(architecture, stated, {})
    return replace(config, stored_scheme=stored_scheme(header))


def _of_transformers(folder: Path) -> Any:
    """With the defaults of the family for what config.json leaves out. Raises ConfigError."""
    from transformers import AutoConfig  # takes four seconds

    try:
        return AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # its validators raise many unrelated types
        raise ConfigError(f"{folder / 'config.json'}: {error}") from error


def read_limits(path: str | Path) -> tuple[int, int]:
    """Vocabulary size and longest context of the model in `path`, equal to `from_pretrained`'s.

    For processes without a model: imports transformers only if config.json leaves one of the two to
    its default. Raises ConfigError as `from_pretrained` does.
    """
    if (gguf := find_gguf(Path(path))) is not None:
        config = _from_gguf(gguf)
        return config.vocab_size, config.max_position_embeddings
    stated = read_json(Path(path) / "config.json")
    _architecture(stated)
    _scheme(Path(path), stated)
    limits = stated.get("vocab_size"), stated.get("max_position_embeddings")
    if all(isinstance(limit, int) and limit > 0 for limit in limits):
        return limits  # type: ignore[return-value]
    config = ModelConfig.from_pretrained(path)
    return config.vocab_size, config.max_position_embeddings


def check_length(max_model_len: int | None, limit: int) -> None:
    """Raise ConfigError if more tokens are asked for than the model's positions reach: beyond them
    its answers are of no use."""
    if max_model_len is not None and max_model_len > limit:
        raise ConfigError(
            f"max_model_len {max_model_len:,} exceeds the {limit:,} tokens that this model was "
            "made for; leave it out, or for longer answers serve a model with a longer context or "
            "take --context-policy sink_window"
        )


def read_stored_scheme(path: str | Path) -> StoredScheme | None:
    """How the checkpoint in `path` is quantised; None if it is not. Raises ConfigError."""
    folder = Path(path)
    if (gguf := find_gguf(folder)) is not None:
        return stored_scheme(read_header(gguf))
    return _scheme(folder, read_json(folder / "config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; ConfigError naming the file if it is missing or is not one."""
    value = _json_in(path)
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return value


def read_json_list(path: Path) -> list[Any]:
    """The same for a JSON list."""
    value = _json_in(path)
    if not isinstance(value, list):
        raise ConfigError(f"{path} does not hold a JSON list")
    return value


def _json_in(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_JSON_BYTES} bytes")
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist; give a folder with a checkpoint that transformers can read"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error


def _scheme(folder: Path, stated: dict[str, Any]) -> StoredScheme | None:
    try:
        return read_scheme(stated)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from error


def _architecture(stated: dict[str, Any]) -> str:
    """The architecture that config.json names. Raises ConfigError if it is not supported."""
    model_type = stated.get("model_type")
    names = stated.get("architectures") or [
        name for name, known in MODEL_TYPES.items() if known == model_type
    ]
    name = names[0] if isinstance(names, list) and names else model_type
    whole = f"{str(name).removesuffix('Model')}ForCausalLM"
    if whole in MODEL_TYPES:  # it was saved without its LM head
        name = whole
    if name not in MODEL_TYPES:
        raise ConfigError(
            f"architecture {name!r} is not supported; supported are {', '.join(MODEL_TYPES)}"
        )
    if model_type != MODEL_TYPES[name]:
        raise ConfigError(
            f"config.json names architecture {name} but model_type {model_type!r}; "
            f"{MODEL_TYPES[name]!r} was expected"
        )
    return str(name)


def _from_transformers(architecture: str, hf: Any, generation: dict[str, Any]) -> ModelConfig:
    model_type = MODEL_TYPES[architecture]
    if hf.hidden_act not in ("silu", "swish"):
        raise ConfigError(f"hidden_act {hf.hidden_act!r} is not supported; supported is 'silu'")
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    attention_bias = bool(getattr(hf, "attention_bias", False))
    qkv_bias = {"qwen2": True, "qwen2_moe": bool(getattr(hf, "qkv_bias", True))}
    is_moe = model_type in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
    return ModelConfig(
        architecture=architecture,
        model_type=model_type,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads or hf.num_attention_heads,
        head_dim=head_dim,
        intermediate_size=hf.intermediate_size,
        rms_norm_eps=float(hf.rms_norm_eps),
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        max_position_embeddings=hf.max_position_embeddings,
        rope=rope_config(hf, head_dim),
        sliding_window=_windows(model_type, hf),
        # Mistral and Mixtral have no biases at all, Qwen2 none outside q, k and v.
        qkv_bias=qkv_bias.get(model_type, attention_bias and model_type in _ATTENTION_BIAS),
        o_bias=attention_bias and model_type in _ATTENTION_BIAS,
        mlp_bias=model_type == "llama" and bool(getattr(hf, "mlp_bias", False)),
        qk_norm={"qwen3": "head", "qwen3_moe": "head", "olmoe": "full"}.get(model_type, "none"),
        clip_qkv=hf.clip_qkv if model_type == "olmoe" else None,
        num_experts=hf.num_experts if is_moe else 0,
        num_experts_per_token=hf.num_experts_per_tok if is_moe else 0,
        # Mixtral and OLMoE have one size only, whatever else config.json holds.
        moe_intermediate_size=(
            hf.moe_intermediate_size
            if model_type in ("qwen2_moe", "qwen3_moe")
            else hf.intermediate_size * is_moe
        ),
        norm_topk_prob=is_moe and (model_type == "mixtral" or bool(hf.norm_topk_prob)),
        shared_expert_intermediate_size=(
            hf.shared_expert_intermediate_size if model_type == "qwen2_moe" else 0
        ),
        moe_layers=_moe_layers(hf) if is_moe else (False,) * hf.num_hidden_layers,
        eos_token_ids=_eos_token_ids(hf, generation),
        bos_token_id=hf.bos_token_id,
        dtype=_dtype(hf),
    )


_ATTENTION_BIAS = ("llama", "qwen3", "qwen3_moe", "olmoe")


def _windows(model_type: str, hf: Any) -> tuple[int | None, ...]:
    window = getattr(hf, "sliding_window", None) or None  # Qwen2-MoE writes 0 for none
    layer_types = getattr(hf, "layer_types", None)
    if model_type in ("llama", "olmoe"):  # these never slide, whatever else config.json holds
        window = None
    elif layer_types is not None and model_type not in ("mixtral", "qwen3_moe"):
        unknown = set(layer_types) - {"full_attention", "sliding_attention"}
        if unknown or len(layer_types) != hf.num_hidden_layers:
            raise ConfigError(
                "layer_types must name full_attention or sliding_attention for each layer; "
                f"got {layer_types}"
            )
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    return (window,) * hf.num_hidden_layers


def _moe_layers(hf: Any) -> tuple[bool, ...]:
    step = getattr(hf, "decoder_sparse_step", 1)
    dense = getattr(hf, "mlp_only_layers", None) or ()
    return tuple(
        layer not in dense and hf.num_experts > 0 and (layer + 1) % step == 0
        for layer in range(hf.num_hidden_layers)
    )


def _eos_token_ids(hf: Any, generation: dict[str, Any]) -> tuple[int, ...]:
    """The union of both files, without ids outside the vocabulary, which some files contain."""
    found: set[int] = set()
    for value in (hf.eos_token_id, generation.get("eos_token_id")):
        ids = value if isinstance(value, list) else [value]
        found.update(i for i in ids if isinstance(i, int) and 0 <= i < hf.vocab_size)
    return tuple(sorted(found))


def _dtype(hf: Any) -> str:
    if hf.dtype is None:
        return "auto"
    name = str(hf.dtype).removeprefix("torch.")
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    if name not in names:
        raise ConfigError(f"dtype {name!r} is not supported; supported are {', '.join(names)}")
    return names[name]
