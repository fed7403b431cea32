"""What `penstock serve` says while it starts, and once it is ready.

Imported by serve.py.
Begin with progress.py.
"""
