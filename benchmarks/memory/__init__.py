"""KV formats, the arena, and memory pressure.

Imported by nothing outside benchmarks.
Begin with pressure.py.
"""
