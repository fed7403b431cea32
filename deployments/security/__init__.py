"""Who may call, what each caller may do and how much, and who a peer is: keys, roles, quotas, TLS.

Imported by preflight, cli and the ingress; certificates by all that use TLS.
Begin with api_keys.py (look a key up), records.py (what a key is), roles.py (who may do what), and
with certificates.py for TLS.
"""
