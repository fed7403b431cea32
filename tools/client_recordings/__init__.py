"""Records what well-known clients send, for tests/deployments/ingress/http/clients/recorded.

Nothing imports it. It runs where a client is installed, which is not where Penstock is developed:
it needs a server's address, and no package of Penstock. Begin in record.py.
"""
