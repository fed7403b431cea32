"""Operators on tensors: attention, matmul, MoE, row-wise operations, sampling.

Imported by workers; imports torch and triton, nothing of ours.
Begin with attention.py and matmul.py: shapes, checks, and the choice of a backend.
"""
