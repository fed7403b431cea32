"""LoRA adapters: low-rank additions to the linears of a model, for the rows that ask for them.

Imported by models/, scheduling/, execution/, engine/ and worker.py.
Begin with table.py; peft.py reads a folder, packed.py computes.
"""
