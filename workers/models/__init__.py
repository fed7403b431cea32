"""The decoder: one configurable transformer for all supported families.

Imported by execution/, engine/, calibrate.py, the expert store and the command line.
Begin with decoder.py, then layers.py; build.py builds it, loader.py finds a checkpoint for it.
"""
