"""From logits to the next token ids.

Imported by execution/ and engine/.
Begin with sampler.py.
"""
