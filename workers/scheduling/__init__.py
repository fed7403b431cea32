"""Which tokens a step computes, and with which blocks.

Imported by engine/ and execution/.
Begin with scheduler.py, then kv_cache.py.
"""
