"""Packed weights on this machine's disk, so that the next start need not quantise them again.

Imported by models/ and engine/.
Begin with cache.py; file.py writes and reads one model's, parts.py hands them out.
"""
