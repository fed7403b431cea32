"""The settings of LoRA adapters, and the names and folders that they give. Loads no torch.

Imported by config.py, and by what checks the name of an adapter.
Begin with options.py.
"""
