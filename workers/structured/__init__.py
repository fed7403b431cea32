"""Answers that follow a JSON schema, regex or grammar: token masks.

Imported by engine/ and sampling/.
Begin with grammar.py; sandbox.py compiles schemas in a helper process.
"""
