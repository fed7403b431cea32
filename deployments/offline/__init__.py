"""Answers in this process: `LLM` for scripts and notebooks. No Ray, no server, no socket.

Imported by users, as `penstock.LLM` and `penstock.SamplingParams`, and by nothing else.
Begin with llm.py; sampling_params.py has its arguments, outputs.py its results.
"""

import os

# OpenMP reads it when PyTorch is loaded, which llm.py does. Threads that wait for one another spin
# for milliseconds by default, and hold up those that have work where cores are shared.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
