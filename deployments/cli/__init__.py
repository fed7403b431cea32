"""The `penstock` command: one file for each subcommand.

Imported by nothing; the entry point is main.py.
Begin with main.py, then serve.py.
"""
