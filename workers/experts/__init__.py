"""The expert cache: experts of MoE models outside the device, loaded and prefetched on demand.

Imported by models/, execution/, engine/, the expert store, worker.py and calibrate.py.
Begin with routed.py, then cache.py; build.py makes the parts from the configuration.
"""
