"""Admission: one actor decides which request enters, when, and on which worker.

Imported by app.py, cluster.py, ingress/ (settings, wire format and address), bench/ and benchmarks;
the rules in here are pure, the caller passes the time.
Begin with controller.py; server.py is the actor around it, service.py applies messages to it.
"""
