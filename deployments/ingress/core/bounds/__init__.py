"""What bounds an ingress: open calls, connections, and a watch of the event loop.

Imported by the core, the front ends and listeners.py.
Begin with limits.py.
"""
