"""What several benchmarks share: a bare engine, and a server process of their own.

Imported by the other folders of benchmarks.
Begin with server_process.py.
"""
