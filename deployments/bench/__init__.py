"""`penstock bench`: loads against any OpenAI-compatible or gRPC server, and against the bare
engine.

Imported by cli/ and by benchmarks.
Begin with open_loop.py; load.py makes the requests, targets.py sends them, figures.py evaluates
them.
"""
