"""Programs for those who work on Penstock: training of the built-in models, outside judges,
pictures.

Imported by nothing.
Begin with conformance.py.
"""
