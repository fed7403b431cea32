"""Kernels on a CPU over shapes and formats.

Imported by nothing outside benchmarks.
Begin with matmul.py.
"""
