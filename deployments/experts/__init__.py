"""The expert store: one actor on each node keeps the experts of an MoE model in shared memory.

Imported by app.py and worker/, which ask the store through client.py.
Begin with store.py; remote.py serves workers on other nodes.
"""
