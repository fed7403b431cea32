"""A hub on this machine for tests: what `huggingface_hub` asks of huggingface.co, over HTTP.

Imported by tests of loading. Begin with server.py.
"""
