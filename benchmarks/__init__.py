"""Programs that measure; nothing imports them. Run from the root: `python -m
benchmarks.engine.offline`.

Each topic is a folder; common/ holds what they share; results/ keeps one run a claim a machine
class.
Begin with engine/offline.py.
"""
