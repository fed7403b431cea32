"""One model over several processes, cut so that its results keep their bits.

Imported by models/, engine/ and engine/group/. Begin with shard.py, then exchange.py, then
layers.py.
"""
