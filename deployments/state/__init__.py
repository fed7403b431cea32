"""The store for what must survive a process: values, streams and token buckets, as bytes.

Imported by the parts that store something; imports nothing of Penstock but settings and errors.
Begin with store.py (the interface), then factory.py.
"""
