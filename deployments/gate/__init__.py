"""Admission: one actor decides which request enters, when, and on which worker.

Imported by ingress/dispatch (wire format and address) and app.py; the rules in here are pure, the
caller passes the time.
Begin with controller.py; server.py is the actor around it, service.py applies messages to it.
"""
