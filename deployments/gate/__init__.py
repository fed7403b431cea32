"""Admission: one actor decides which request enters, when, and on which worker.

Imported by app.py, cluster.py, ingress/ (settings, wire format and actor), bench/ and benchmarks;
the rules in here are pure, the caller passes the time.
Begin with controller.py; service.py applies messages to it, and server.py is the process around it.
"""
