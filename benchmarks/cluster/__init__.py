"""The whole path from client to worker: overhead, slow and bad clients, the ingress's CPU time.

Imported by nothing outside benchmarks.
Begin with overhead.py.
"""
