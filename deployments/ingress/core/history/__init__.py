"""What is kept of an answer: its spans, and its place among the recent ones.

Imported by core/service.py, which records, and http/status/, which shows; the records themselves
are in core/tracing.py.
Begin with recent_answers.py.
"""
