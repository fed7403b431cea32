"""The HTTP front end: OpenAI's APIs, Anthropic's Messages API, tokenize, and the web console.

Imported by replica.py.
Begin with app.py; middleware.py is the edge that each request passes first.
"""
