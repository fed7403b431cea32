"""The expert MLP of a mixture-of-experts layer, and how an expert lies in memory.

Imported by workers/models and workers/experts. Begin with mlp.py.
"""
