"""Admission: simulated fleets, real engines, latency and scale of the gate.

Imported by nothing outside benchmarks.
Begin with simulate.py; sim/ is the simulator.
"""
