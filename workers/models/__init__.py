"""The decoder: one configurable transformer for all supported families.

Imported by execution/ and engine/.
Begin with decoder.py, then layers.py; loader.py makes one from a checkpoint.
"""
