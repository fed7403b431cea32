"""How the text of an answer is read: its reasoning, and the tools that it calls.

Imported by the core, and by the front ends for their errors. Imports no front end.
Begin with reasoning.py; tool_forms has a parser for each form of tool calls.
"""
