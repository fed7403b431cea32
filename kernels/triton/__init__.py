"""The GPU backend: Triton programs and their launchers.

Imported by the operators of the parent folder.
Begin with attention.py; *_kernels.py hold the programs.
"""
