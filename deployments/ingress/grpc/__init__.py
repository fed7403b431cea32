"""The gRPC front end: Penstock's own service, the Open Inference Protocol, health and reflection.

Imported by replica.py.
Begin with server.py, then inference.py.
"""
