"""From the ingress to the workers: admission, the choice of a worker, and the token connections.

Imported by replica.py, http/ and metrics/.
Begin with pool.py; worker_link.py keeps one connection, gate_client.py asks the gate.
"""
