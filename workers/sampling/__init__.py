"""From logits to the next token ids: penalties, bias, logprobs, and the draw.

Imported by scheduling/ and execution/.
Begin with sampler.py.
"""
