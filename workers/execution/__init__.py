"""A plan on the device: batch arrays, the forward pass, sampled ids.

Imported by engine/.
Begin with executor.py; cuda_graphs.py and cpu_replay.py repeat decode steps cheaply.
"""
