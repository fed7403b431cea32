"""OpenAI's Responses API: request bodies, items, answers as they grow, and stored responses.

Imported by http/app.py.
Begin with routes.py.
"""
