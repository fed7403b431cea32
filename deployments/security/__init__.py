"""Who may call: API keys and client ids.

Imported by config.py and ingress/.
Begin with api_keys.py.
"""
