"""Quantised experts in the expert file: stored as the bytes that the device multiplies.

An expert is packed as it would be without a cache: the same codes, from the same weights, by the
same function; so results have the same bits. Codes of a down matrix share scales across neurons:
therefore an expert is cut into pieces of equal size, not into neurons.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from penstock.kernels.moe.image import ExpertImage, pack_for
from penstock.kernels.moe.mlp import Expert
from penstock.kernels.quant import INT8_GROUP, QuantizedWeight
from penstock.workers.errors import LoadError
from penstock.workers.experts.checkpoint import CheckpointExperts
from penstock.workers.experts.expert_file import PIECE_BYTES, Bytes, Manifest, digest_of
from penstock.workers.experts.fused import expert_biases, fused_expert
from penstock.workers.quantization import weight_plan
from penstock.workers.weights.joined import joined
from penstock.workers.weights.sources import CheckpointWeights, planned

ZEROS = (".qzeros", ".weight_zero_point")  # stored next to the codes of an int4 weight


@dataclass(eq=False)
class PackedExperts:
    """Packs `experts` for models that compute in `compute`. Raises LoadError for a checkpoint that
    cannot be read."""

    experts: CheckpointExperts
    compute: torch.dtype
    int8_group: int | None = INT8_GROUP  # of the activations: no matter of the bytes
    # Byte layouts, the same for every expert of a layer, and which one each layer has.
    images: tuple[ExpertImage, ...] = field(init=False)
    kinds: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        experts, config = self.experts, self.experts.config
        scheme = config.stored_scheme
        self._format = weight_plan(scheme, experts.weights).format
        self._has_zeros = any(name.endswith(ZEROS) for name in experts.names())
        self._source = CheckpointWeights(
            experts.folder,
            experts.tensors,
            config.dtype,
            "cpu",
            lambda _: None,
            scheme=scheme,
            dequantize=scheme is not None and scheme.is_opened(experts.weights),
        )
        self._biases: dict[int, tuple[Tensor, Tensor] | None] = {}
        self._first = self.packed(experts.layers[0], 0)
        self._find_kinds()

    @property
    def num_bytes(self) -> int:
        """Of an expert in the expert file: as many as the widest takes."""
        return max(image.num_bytes for image in self.images)

    def packed(self, layer: int, expert: int) -> Expert:
        """One expert, packed as the loader would."""
        device = torch.device(self.experts.device)
        gate_up, down = (
            pack_for(self._uniform(self._planned(weight)), device, bias)
            for weight, bias in zip(
                self._weights(layer, expert), self._biases_of(layer, expert), strict=True
            )
        )
        return gate_up, down

    def _biases_of(self, layer: int, expert: int) -> tuple[Tensor | None, Tensor | None]:
        if layer not in self._biases:
            config, name = self.experts.config, self.experts.block(layer)
            self._biases = {layer: expert_biases(self._source, config, name)}  # those of one layer
        found = self._biases[layer]
        return (None, None) if found is None else (found[0][expert], found[1][expert])

    def _planned(self, weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
        return planned(weight, self._format, self.compute, self.int8_group, self.experts.int4)

    def rows(self, layer: int, expert: int) -> Bytes:
        """The bytes of an expert in pieces, [num_rows, PIECE_BYTES], padded with zeros. Raises
        LoadError for an expert that is stored in another format than the first one of its kind."""
        packed = self._first
        if (layer, expert) != (self.experts.layers[0], 0):
            packed = self.packed(layer, expert)
        try:
            image = self.images[self.kinds[layer]].bytes_of(packed)
        except ValueError as error:
            raise LoadError(
                f"{self.experts.folder}: layer {layer}, expert {expert} is {error}; an expert "
                "cache needs experts that are all stored in the same format: leave expert_cache_gb "
                "out, or quantise the original checkpoint with penstock quantize"
            ) from error
        spare = -(-self.num_bytes // PIECE_BYTES) * PIECE_BYTES - len(image)
        return torch.nn.functional.pad(image, (0, spare)).view(-1, PIECE_BYTES).numpy()

    def check(self, manifest: Manifest) -> None:
        """Raise LoadError unless the expert file holds the bytes that would be packed here."""
        layer, expert = next(manifest.experts())
        known = manifest.digests()[layer, expert]
        if manifest.packed_bytes != self.num_bytes or digest_of(self.rows(layer, expert)) != known:
            raise LoadError(
                f"the expert store {manifest.path} packed its experts for another CPU or another "
                f"release: this worker reads {self.images[0]}; restart the cluster, with "
                "expert_store each if its nodes differ"
            )

    def _find_kinds(self) -> None:
        """GGUF files have some layers in more bits than others; elsewhere all are alike."""
        images = [ExpertImage(self._first)]
        self.kinds, known = {}, {self.experts.blocks(self.experts.layers[0]): 0}
        for layer in self.experts.layers:
            blocks = self.experts.blocks(layer)
            if blocks not in known:
                image = ExpertImage(self.packed(layer, 0))
                if image not in images:
                    images.append(image)
                known[blocks] = images.index(image)
            self.kinds[layer] = known[blocks]
        self.images = tuple(images)

    def _weights(self, layer: int, expert: int) -> tuple[Tensor | QuantizedWeight, ...]:
        """gate_up [2 * inner, hidden] and down [hidden, inner], as stored."""
        if self.experts.is_fused(layer):
            name = self.experts.block(layer)
            return fused_expert(self._source, self.experts.config, name, expert)
        modules = self.experts.modules(layer, expert).items()
        found = [self._source.take_linear(module, *shape) for module, shape in modules]
        return joined(found[:2]), found[2]

    def _uniform(self, weight: Tensor | QuantizedWeight) -> Tensor | QuantizedWeight:
        """With explicit zero points if some experts have them: a missing one means 8."""
        if not self._has_zeros or isinstance(weight, Tensor) or weight.format != "int4":
            return weight
        if weight.zeros is not None:
            return weight
        return replace(weight, zeros=torch.full_like(weight.scales, 8, dtype=torch.uint8))
