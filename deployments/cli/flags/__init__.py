"""The flags of the commands of `penstock`: parsers, without what the commands do.

Imported by cli/main.py, and so by every command: nothing here loads torch or Ray. Begin with
bench.py.
"""
