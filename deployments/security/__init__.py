"""Who may call: API keys and client ids.

Imported by ingress/http and ingress/grpc.
Begin with api_keys.py.
"""
