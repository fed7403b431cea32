"""The store in a Redis server, which several processes and machines share.

Imported by ../factory.py.
Begin with store.py; link.py owns a connection, functions.lua and transactions.py have the verbs.
"""
