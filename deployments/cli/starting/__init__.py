"""What `penstock serve` sets before it starts, and says while it does and once it is ready.

Imported by main.py and serve.py.
Begin with progress.py.
"""
