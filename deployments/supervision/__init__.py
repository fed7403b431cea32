"""Which processes are alive: the registry of workers and ingresses, and how actors are kept.

Imported by app.py, cluster.py, cli/, experts/, gate/, ingress/ and worker/.
Begin with registry.py.
"""
