"""The engine alone, without a server: tokens a second next to transformers and vLLM, and quality of
formats.

Imported by nothing outside benchmarks.
Begin with offline.py.
"""
