"""OpenAI's Chat Completions and Completions APIs: request bodies, answers and routes.

Imported by http/app.py; responses/ and anthropic/ share its tools and messages.
Begin with routes.py, then requests.py and rendering.py.
"""
