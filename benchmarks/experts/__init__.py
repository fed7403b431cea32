"""MoE experts from host memory: speed, memory, quality, and the accuracy of prefetching.

Imported by nothing outside benchmarks.
Begin with speed.py.
"""
