"""Who may call, and who a peer is: API keys, client ids, certificates.

Imported by preflight, cli and the ingress; certificates by all that use TLS.
Begin with api_keys.py, and with certificates.py for TLS.
"""
