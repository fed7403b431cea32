"""Checkpoints: where they are found, how they are read, and how they are quantised.

Imported by models/ and experts/.
Begin with checkpoint.py; sources.py turns stored layouts into plain weights.
"""
