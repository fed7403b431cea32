"""The engine alone, without a server: tokens a second beside transformers and vLLM, and quality of
formats.

Imported by nothing outside benchmarks.
Begin with offline.py.
"""
