"""What each model family says in its config.json, and how its checkpoints name their tensors.

Imported by model_config.py, the loader, and all that reads a checkpoint's tensors. Begin with
family.py, then table.py; a new family is an entry there and, where it differs, a function that
reads its switches. Loads no torch and no transformers.
"""
