"""The processes of a tensor-parallel group: the first rank's side, the others', and what they say.

Imported by engine/load.py. Begin with leader.py, then wire.py, then follower.py.
"""
