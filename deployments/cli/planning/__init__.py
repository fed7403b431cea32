"""`penstock plan`: what a model needs, and what a machine gives.

Imported by main.py.
Begin with plan.py.
"""
