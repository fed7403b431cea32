"""How many replicas there should be: pure policies over the gate's figures, and Serve's adapter.

Imported by app.py, by Serve's controller (serve_policy.py) and by benchmarks.
Begin with policy.py: `decide(signals, state, now, config)`.
"""
