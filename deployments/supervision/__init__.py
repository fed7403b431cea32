"""Which processes are alive: the registry of workers and ingresses, and how actors are kept.

Imported by ingress/, worker/, gate/ and cluster.py.
Begin with registry.py.
"""
