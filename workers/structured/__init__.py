"""Structured output: token masks for answers that follow a JSON schema, regex or grammar.

Imported by engine/ and scheduling/.
Begin with grammar.py; sandbox.py runs the helper process, trial.py, that compiles first.
"""
