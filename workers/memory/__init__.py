"""Bytes and block ids: the arena, the block pool, step workspaces, and host memory.

Imported by experts/, models/, scheduling/, execution/ and engine/.
Begin with arena.py, then block_pool.py.
"""
