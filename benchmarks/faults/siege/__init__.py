"""A million hostile requests beside honest streams: `python -m benchmarks.faults.siege`.

A program; no module imports it. Begin with __main__.py. attacks.py has the hostile clients, wire.py
the bytes that they send, honest.py the streams whose answers and times are compared.
"""
