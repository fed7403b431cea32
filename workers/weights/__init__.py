"""Checkpoints: finding, reading and quantising them. hub.py loads no torch.

Imported by models/, experts/, engine/ and the expert store; hub.py also by the ingress, preflight
and the command line.
Begin with checkpoint.py; sources.py casts and dequantises, stored.py reads quantised layouts.
"""
