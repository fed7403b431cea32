"""llama.cpp as an oracle for GGUF files: its tokenizer, its log-probabilities, its quantiser.

Needs `pip install llama-cpp-python`, which compiles llama.cpp for the machine in ten minutes or so;
it is no dependency of Penstock's, not even of its benchmarks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

# Names of llama_ftype as the files have them.
FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9,
    "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18,
}  # fmt: skip


def version() -> str:
    """Of llama-cpp-python. Raises SystemExit, with the remedy, where it is not installed."""
    return f"llama-cpp-python {_library().__version__}"


class LlamaCpp:
    """One GGUF file in llama.cpp: on the CPU, K and V in fp16, `threads` threads."""

    def __init__(self, file: Path, context: int, threads: int):
        self._model = _library().Llama(
            str(file),
            n_ctx=context,
            n_batch=context,
            n_threads=threads,
            n_threads_batch=threads,
            logits_all=True,
            verbose=False,
        )

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, without a token before it; control tokens in it count as such."""
        found: list[int] = self._model.tokenize(text.encode(), add_bos=False, special=True)
        return found

    def token_nll(self, ids: Sequence[int]) -> list[float]:
        """-log p of each id but the first, given all before it."""
        self._model.reset()
        self._model.eval(list(ids))
        logits = torch.from_numpy(self._model.scores[: len(ids) - 1])
        following = torch.tensor(ids[1:])
        found: list[float] = torch.nn.functional.cross_entropy(
            logits, following, reduction="none"
        ).tolist()
        return found

    def close(self) -> None:
        self._model.close()


def quantize(source: Path, target: Path, kind: str, threads: int) -> None:
    """Write the weights of `source` as `kind`, a key of FILE_TYPES; blocks are decoded first.

    Tensors whose rows are no multiple of 256 get other types where `kind` is of the K types.
    """
    library = _library()
    params = library.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = FILE_TYPES[kind], threads, True
    failed = library.llama_model_quantize(
        str(source).encode(), str(target).encode(), ctypes.byref(params)
    )
    if failed:
        raise RuntimeError(f"llama.cpp could not write {target} as {kind}")


def _library() -> Any:
    try:
        import llama_cpp
    except ImportError as error:
        raise SystemExit(
            f"this part compares with llama.cpp: pip install llama-cpp-python ({error})"
        ) from error
    return llama_cpp
