"""The judge of quality: what number formats and context policies cost beside a baseline.

Imported by `penstock eval` and by benchmarks; imports the engine.
Begin with judge.py; figures.py has the statistics.
"""
