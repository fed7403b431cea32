"""Speculation: draft tokens for decoding sequences, and how many of them a step verifies.

Imported by scheduling and engine. Begin with draft.py; works on token ids, without a model.
"""
