"""The gate's end of its connections: the port, TLS, proofs, and the stream of each ingress.

Imported by server.py; the ingress imports greeting.py and tls.py for its own end.
Begin with port.py.
"""
