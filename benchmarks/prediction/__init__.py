"""The length predictor on real traces.

Imported by nothing outside benchmarks.
Begin with online.py.
"""
