"""What becomes of a prompt's hidden states where nothing is generated: an embedding, or a score.

Read from a model's files without its weights. Imported by the engine and by the ingress.
Begin with pooling.py.
"""
