"""The expert store: one actor on each node keeps the experts of an MoE model in shared memory.

Imported by cluster.py and worker/, which calls the store through client.py.
Begin with store.py; remote.py serves workers on other nodes.
"""
