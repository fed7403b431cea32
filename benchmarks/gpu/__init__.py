"""Every Triton kernel on a GPU: correctness, then time over its roofline floor.

Imported by nothing outside benchmarks.
Begin with check.py.
"""
