"""Mixture-of-experts weights outside the device: the expert file, the cache, and prefetching.

Imported by models/ and engine/.
Begin with routed.py, then cache.py; build.py makes the parts from the configuration.
"""
