"""`penstock eval`: texts and flags in; table, JSON and picture out.

Imported by cli/main.py when the command runs. Begin with evaluate.py; workers/evaluation does the
measuring.
"""
