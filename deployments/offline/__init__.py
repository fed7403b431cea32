"""Answers in this process: `LLM` for scripts and notebooks. No Ray, no server, no socket.

Imported by users, as `penstock.LLM` and `penstock.SamplingParams`, and by nothing else.
Begin with llm.py; sampling_params.py has its arguments, outputs.py its results.
"""
