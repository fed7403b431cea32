"""Prometheus metrics of the ingress, of its workers and of the gate.

Imported by replica.py.
Begin with tables.py, which names every metric; collector.py reads the values.
"""
