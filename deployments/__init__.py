"""The cluster: who is admitted, where a request runs, and what survives a failure.

Imported by benchmarks and tests; imports workers, kernels' number formats and protos, never the
other way.
Begin with app.py, which wires the Ray Serve application, then ingress/replica.py and
worker/replica.py.
"""
