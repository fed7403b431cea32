"""`penstock keys` and `penstock certs`: who may call, and who a process is.

Imported by main.py.
Begin with keys.py.
"""
