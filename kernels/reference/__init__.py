"""Plain PyTorch in fp32: what every other backend is compared with.

Imported by the operators of the parent folder and by tests.
Begin with attention.py.
"""
