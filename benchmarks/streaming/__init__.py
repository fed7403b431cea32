"""Quality and memory of endless answers.

Imported by nothing outside benchmarks.
Begin with quality.py.
"""
