"""Training and evaluation of the two built-in models.

Imported by nothing outside this folder.
Begin with train.py.
"""
