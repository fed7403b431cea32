"""How much KV memory the answers of one worker will need at their peak. Pure arithmetic.

Imported by gate/ledger.py and the types around it; imports nothing of the gate.
Begin with sampled.py, the rule that serves; gaussian.py is the same rule for thousands of workers.
"""
