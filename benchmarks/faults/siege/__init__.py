"""A million hostile requests beside honest streams: `python -m benchmarks.faults.siege`.

Imported by nobody. Begin with __main__.py; attacks.py has the hostile clients, wire.py what they
speak, honest.py the streams whose answers and pauses are compared.
"""
