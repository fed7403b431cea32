"""What is checked of an HTTP connection before a route: its bounds, TLS, the name it asks for.

Imported by listeners.py, and by middleware.py and app.py for the names.
Begin with protocol.py.
"""
