"""The routes of `penstock status`, `penstock queue` and `penstock explain`.

Imported by http/app.py.
Begin with cluster.py.
"""
