"""Answer lengths, learnt online: a distribution of the remaining length for each request. Pure.

Imported by gate/, bench/, ingress/core (its features) and benchmarks.
Begin with predictor.py, then distribution.py.
"""
