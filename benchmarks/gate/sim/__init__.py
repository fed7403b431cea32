"""The simulator of workers and loads that drives the production gate.

Imported by benchmarks/gate and its tests.
Begin with events.py.
"""
