"""The state stores: what an append costs.

Imported by nothing outside benchmarks.
Begin with stores.py.
"""
