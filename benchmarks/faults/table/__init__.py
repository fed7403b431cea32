"""The fault table: what was injected, what was promised, and what was seen, row by row.

`python -m benchmarks.faults.table` runs it. Each file has the rows of one topic; rows.py has what
a row is.
"""
