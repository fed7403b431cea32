"""Journals of calls in the state store, so that a stream can continue after its ingress has ended.

Imported by the front ends (http/, grpc/) and the listeners. Begin with `journals.py`.
"""
