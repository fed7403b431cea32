"""Parsers of the forms in which models write tool calls, and the grammars of forced calls.

Imported by generation.py, preparation.py and the programs that make a core. Begin with table.py.
"""
