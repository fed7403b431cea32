"""Anthropic's Messages API: request bodies, content blocks, answers and routes.

Imported by http/app.py.
Begin with routes.py.
"""
