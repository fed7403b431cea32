"""Faults injected into real processes, and whether clients notice.

Programs; no other package imports them.
Begin with random_kills.py; cluster.py has the live cluster that several of them share.
"""
