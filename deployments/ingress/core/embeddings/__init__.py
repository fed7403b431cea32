"""Embeddings of texts: prompts that nothing is generated after, and what is made of their vectors.

Imported by the front ends.
Begin with embed.py.
"""
