"""The model's shape from a checkpoint's config.json or a GGUF file's metadata, as one frozen
dataclass for all families, which families/ reads.

Only this module and text/ import transformers.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from penstock.workers.errors import ConfigError
from penstock.workers.families.family import Family
from penstock.workers.families.linear_attention import LinearAttentionConfig
from penstock.workers.families.reading import fields_of
from penstock.workers.families.router_config import PLAIN_ROUTER, RouterConfig
from penstock.workers.families.table import FAMILIES, family_of, text_of
from penstock.workers.gguf.config import stated_by, stored_scheme
from penstock.workers.gguf.dense import WHOLE_NORMS
from penstock.workers.gguf.header import find_gguf, read_header
from penstock.workers.quantization import StoredScheme, read_scheme
from penstock.workers.rope_config import QueryScaling, RopeConfig
from penstock.workers.stated_config import stated_in_full

Activation = Literal["silu", "gelu_tanh"]  # as kernels/types.py has them
# Of the norms of a layer's attention and of its MLP: of the input, of the output before it is added
# to the residual stream, or of both.
NORM_PLACES = ("pre", "post", "sandwich")
MAX_JSON_BYTES = 16 * 2**20  # the largest real config.json is some KiB


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape and the switches of one decoder-only model. Sizes count elements, not bytes."""

    architecture: str  # a key of families.table.FAMILIES
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
    ropes: tuple[RopeConfig, ...]  # all with the same rotary_dim
    sliding_window: tuple[int | None, ...]  # per layer; None: full attention
    layer_ropes: tuple[int | None, ...] = ()  # per layer, in `ropes`; None: it turns nothing
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = "none"  # "head": over each head; "full": over the whole projection (OLMoE)
    clip_qkv: float | None = None
    norm_place: str = "pre"  # one of NORM_PLACES
    norm_offset: float = 0.0  # added to the stored weights of norms, in fp32
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add to the residual stream
    attention_scale: float | None = None  # of q.k; None: head_dim^-1/2
    attention_softcap: float = 0.0  # c: a score s becomes c * tanh(s / c); 0: none
    logits_divisor: float = 1.0
    logits_softcap: float = 0.0  # as of attention, of logits
    query_scaling: QueryScaling | None = None
    attention_sinks: bool = False  # each head has one more score, which has no value
    attention_gate: bool = False  # heads' outputs are weighted by sigmoids, from rows of q_proj
    linear_attention: LinearAttentionConfig | None = None  # of the layers that have it
    linear_layers: tuple[bool, ...] = ()  # per layer; (): none has linear attention
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False  # normalise the chosen experts' weights to sum to one
    router: RouterConfig = PLAIN_ROUTER
    shared_expert_intermediate_size: int = 0  # 0: no shared expert
    expert_bias: bool = False  # of routed experts' projections
    swiglu_clamp: tuple[float, float] | None = None  # experts: alpha, limit; None: SiLU
    shared_expert_gate: bool = True  # its output is weighted by the sigmoid of a product
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
        for rope in self.ropes:
            if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= self.head_dim:
                raise ConfigError(
                    "the rotary dimension must be even and lie in [2, head_dim = "
                    f"{self.head_dim}]; got {rope.rotary_dim}"
                )
        self._check_scales()
        if any(self.moe_layers) and not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ConfigError(
                f"num_experts_per_token ({self.num_experts_per_token}) must lie in "
                f"[1, num_experts = {self.num_experts}]"
            )
        if any(self.moe_layers):
            self.router.check(self.num_experts, self.num_experts_per_token)
        for window in self.sliding_window:
            if window is not None and window < 1:
                raise ConfigError(f"sliding_window must be positive; got {window}")
        assert len(self.sliding_window) == len(self.moe_layers) == self.num_layers

        assert len(self.linear_layers) in (0, self.num_layers)
        if self.has_states and self.linear_attention is None:
            raise ConfigError("layers with linear attention need its shape")
        assert len(self.layer_ropes) in (0, self.num_layers) and self.norm_place in NORM_PLACES
        assert len({rope.rotary_dim for rope in self.ropes}) == 1

    def _check_scales(self) -> None:
        for name in ("embedding_scale", "residual_scale", "logits_divisor", "attention_scale"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be a positive number; got {value}")
        for name in ("attention_softcap", "logits_softcap"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must be a positive number; got {getattr(self, name)}")

    @property
    def scale(self) -> float:
        """The factor of q.k before the softmax."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def rotary_dim(self) -> int:
        return self.ropes[0].rotary_dim

    @property
    def has_states(self) -> bool:
        """Whether some layers have linear attention, with a state in place of K and V."""
        return any(self.linear_layers)

    @property
    def num_kv_layers(self) -> int:
        """Layers with K and V."""
        return self.num_layers - sum(self.linear_layers)

    @property
    def most_ranks(self) -> int:
        """That can share a layer: each has a head."""
        if self.linear_attention is None or not self.has_states:
            return self.num_heads
        return min(self.num_heads, self.linear_attention.num_value_heads)

    def check_stages(self, num_stages: int) -> None:
        """Raises ConfigError if the model cannot be divided so: the first stage, which counts
        blocks, needs a layer that has K and V, and the first stages have the larger shares."""
        before = self.linear_layers.index(False) if self.has_states else 0
        if num_stages > 1 and -(-self.num_layers // num_stages) <= before:
            raise ConfigError(
                f"pipeline_parallel_size {num_stages} leaves the first stage without a layer that "
                "has K and V, which it needs beside those with linear attention; set it to "
                f"{(self.num_layers - 1) // before} at most"
            )

    def is_linear(self, layer: int) -> bool:
        return bool(self.linear_layers) and self.linear_layers[layer]

    def rope_of(self, layer: int) -> int | None:
        """Which of `ropes` turns q and k of `layer`; None: they are not turned."""
        return self.layer_ropes[layer] if self.layer_ropes else 0

    def for_length(self, max_length: int | None) -> ModelConfig:
        """For contexts of up to `max_length` tokens; None: as many as the model's positions."""
        length = self.max_position_embeddings if max_length is None else max_length
        return replace(self, ropes=tuple(rope.for_length(length) for rope in self.ropes))

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
        family = family_of(stated)
        scheme = _scheme(folder, stated)
        hf: Any = stated_in_full(stated) or _of_transformers(folder)
        generation: dict[str, Any] = {}
        if (folder / "generation_config.json").is_file():
            generation = read_json(folder / "generation_config.json")
        try:
            return replace(_read(family, hf, generation), stored_scheme=scheme)
        except ConfigError:
            raise
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{folder / 'config.json'}: unusable setting: {error}") from error


def _from_gguf(file: Path) -> ModelConfig:
    header = read_header(file)
    architecture, stated = stated_by(header)
    config = _read(FAMILIES[architecture], stated, {})
    if header.metadata["general.architecture"] in WHOLE_NORMS:
        config = replace(config, norm_offset=0.0)
    return replace(config, stored_scheme=stored_scheme(header))


def _read(family: Family, hf: Any, generation: dict[str, Any]) -> ModelConfig:
    return ModelConfig(**fields_of(family, hf, generation))


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
    family_of(stated)
    _scheme(Path(path), stated)
    text = text_of(stated)
    limits = text.get("vocab_size"), text.get("max_position_embeddings")
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
