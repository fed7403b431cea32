"""The Ray Serve deployment around one worker.

Imported by app.py.
Begin with replica.py.
"""
