"""What the gate predicts: a worker's memory at its peak, cached prefixes, start times, Retry-After.

Imported by the files of gate/, and by ingress/ for prefixes; imports nothing of the gate.
Begin with sampled.py, the admission rule.
"""
