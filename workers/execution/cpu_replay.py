"""Batches of decode rows on a CPU without Python between the operators: recorded, then replayed.

A forward pass over T decode rows makes the same calls with the same arguments each time, except for
the contents of its inputs. So the inputs are copied to fixed addresses, the first pass over T rows
is recorded there, and each later one is one call of the native library. The results are the same
to the bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.kernels.cpu.replay import Program, record
from penstock.kernels.delta_types import StateRows
from penstock.kernels.types import DecodeBatch, PrefillBatch
from penstock.workers.memory.workspace import Workspace
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.layers import AttentionInputs, LayerCache, RollingInputs
from penstock.workers.models.stages.decoder import StageDecoder

log = logging.getLogger("penstock.engine")


@dataclass(frozen=True, slots=True)
class _Recorded:
    program: Program
    inputs: AttentionInputs  # the program holds addresses in them
    workspace: Workspace  # and in it
    threads: int


RunLayers = Callable[[AttentionInputs, Sequence[LayerCache], Workspace], Tensor]


def replay_for(
    model: Decoder, kv_layers: Sequence[LayerCache], max_rows: int, max_blocks: int
) -> DecodeReplay | None:
    """For the executor of `model`. None: it runs on a GPU, or is a stage, which receives and sends
    rows itself, and replays its layers between. Numbers: as DecodeReplay's."""
    if model.device.type != "cpu":
        return None
    if isinstance(model, StageDecoder):
        model.replay = DecodeReplay(model.own_layers, kv_layers, max_rows, max_blocks)
        return None
    return DecodeReplay(model.run_layers, kv_layers, max_rows, max_blocks)


class DecodeReplay:
    """Runs the layers of one decoder over decode rows, from recorded programs where possible.

    Not every model can be replayed: where PyTorch computes between the operators (the routing of
    experts, clipping, kernels that the native library does not have), no step is.
    """

    def __init__(
        self, run: RunLayers, kv_layers: Sequence[LayerCache], max_rows: int, max_blocks: int
    ):
        """`run`: Decoder.run_layers, or as that. For steps of up to `max_rows` rows, block tables
        of up to `max_blocks` entries."""
        self._run = run
        self._kv_layers = kv_layers
        self._max_rows = max_rows
        self._inputs = _fixed_inputs(max_rows, max_blocks)
        self._recorded: dict[tuple[int, bool], _Recorded] = {}
        self._is_possible = True

    def suits(self, inputs: AttentionInputs) -> bool:
        """Whether a step can be replayed: decode rows only, and within the limits."""
        num_rows, num_blocks = inputs.decode.block_tables.shape
        fits = (
            num_rows <= self._max_rows and num_blocks <= self._inputs.decode.block_tables.shape[1]
        )
        return self._is_possible and fits and num_rows == len(inputs.slots)

    def run_layers(self, inputs: AttentionInputs, workspace: Workspace) -> None:
        """`Decoder.run_layers` for inputs that `suits`.

        For a given number of rows, `workspace` should be the same object at the same addresses:
        with another one the step is recorded again.
        """
        key = (inputs.num_decode, inputs.rolling is not None)
        known = self._recorded.get(key)
        if (
            known is not None
            and known.workspace is workspace
            and known.threads == torch.get_num_threads()
        ):
            _copy_inputs(inputs, known.inputs)
            known.program.run()
            return
        fixed = _first_rows(self._inputs, inputs.num_decode, inputs)
        _copy_inputs(inputs, fixed)
        with record() as recording:
            self._run(fixed, self._kv_layers, workspace)
        program = None if recording is None else recording.program()
        if program is None:
            self._is_possible = False
            computed = [] if recording is None else sorted(set(recording.computed))
            log.info("decode steps are not replayed: PyTorch computes in them (%s)", computed)
            self._recorded.clear()
            return
        self._recorded[key] = _Recorded(program, fixed, workspace, torch.get_num_threads())


def _copy_inputs(inputs: AttentionInputs, fixed: AttentionInputs) -> None:
    """Copy `inputs` to the addresses of `fixed`, which has as many rows."""
    num_blocks = inputs.decode.block_tables.shape[1]
    fixed.slots.copy_(inputs.slots)
    fixed.decode.context_lens.copy_(inputs.decode.context_lens)
    fixed.decode.block_tables[:, :num_blocks] = inputs.decode.block_tables
    if inputs.rolling is not None and fixed.rolling is not None:
        for name in ("sink_ends", "window_starts", "sink_blocks", "bases"):
            getattr(fixed.rolling, name).copy_(getattr(inputs.rolling, name))
    if inputs.states is not None and fixed.states is not None:
        for name in ("starts", "sources", "write_starts", "write_after", "write_slots"):
            given = getattr(inputs.states, name)
            getattr(fixed.states, name)[: len(given)] = given


def _fixed_inputs(max_rows: int, max_blocks: int) -> AttentionInputs:
    def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    rolling = RollingInputs(
        sink_positions=numbers(0, dtype=torch.int64),
        sink_ends=numbers(max_rows),
        window_starts=numbers(max_rows),
        sink_blocks=numbers(max_rows),
        bases=numbers(max_rows),
        max_visible_len=0,
    )
    return AttentionInputs(
        slots=numbers(max_rows, dtype=torch.int64),
        num_decode=max_rows,
        decode=DecodeBatch(numbers(max_rows, max_blocks), numbers(max_rows), max_context_len=0),
        prefill=PrefillBatch(numbers(0, 0), numbers(1), numbers(0), max_query_len=0),
        rolling=rolling,
        states=StateRows(
            numbers(max_rows + 1),
            numbers(max_rows),
            numbers(max_rows + 1),
            numbers(max_rows),
            numbers(max_rows),
        ),
    )


def _first_rows(fixed: AttentionInputs, num_rows: int, inputs: AttentionInputs) -> AttentionInputs:
    """Views of the first rows; maximum lengths are those of `inputs`, and size no launch on a CPU:
    a recorded program may keep them."""
    rolling = None
    if inputs.rolling is not None and fixed.rolling is not None:
        rolling = RollingInputs(
            inputs.rolling.sink_positions,  # read before the layers run, so not copied
            fixed.rolling.sink_ends[:num_rows],
            fixed.rolling.window_starts[:num_rows],
            fixed.rolling.sink_blocks[:num_rows],
            fixed.rolling.bases[:num_rows],
            inputs.rolling.max_visible_len,
        )
    states = None
    if inputs.states is not None and fixed.states is not None:
        states = StateRows(
            fixed.states.starts[: num_rows + 1],
            fixed.states.sources[:num_rows],
            fixed.states.write_starts[: num_rows + 1],
            fixed.states.write_after,
            fixed.states.write_slots,
        )
    return replace(
        fixed,
        slots=fixed.slots[:num_rows],
        num_decode=num_rows,
        decode=DecodeBatch(
            fixed.decode.block_tables[:num_rows],
            fixed.decode.context_lens[:num_rows],
            inputs.decode.max_context_len,
        ),
        rolling=rolling,
        states=states,
    )
