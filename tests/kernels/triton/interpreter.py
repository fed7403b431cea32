"""What the checks of the Triton kernels share: where they run, and an interpreter that is in haste.

Import it before any kernel is launched.
"""

from __future__ import annotations

import torch
from triton.runtime import interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies the raw bits of bf16 matrices, so there fp16 stands for it.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16


def _make_haste() -> None:
    """A third of the interpreter's time, in Triton 3.9, tells our kernels nothing.

    It patches triton.language at a launch, and all over again at each call of a device function:
    once a launch and module is enough. It checks each 32-bit sum and product for overflow: without
    that they wrap as they do on a GPU, and the result is wrong.
    """
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[str] = set()

    def patch_once(fn):
        module = fn.__globals__["__name__"]
        if module in patched:
            return None  # a device function, whose caller asks for nothing
        patched.add(module)
        return patch(fn)

    def launch_afresh(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_afresh
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)


_make_haste()
