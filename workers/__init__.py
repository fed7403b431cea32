"""One worker, from token ids to the next token id. No Ray.

Imported by deployments; imports kernels and protos.
Begin with worker.py, then engine/engine.py.
"""
