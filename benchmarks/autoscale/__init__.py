"""Autoscaling policies against each other, in simulation: workers take minutes to start.

Run by hand; imports the pure policy and nothing of Ray.
Begin with simulate.py.
"""
