"""The findings of the security review, attacked again: one figure for each, beside that of then.

Run as `python -m benchmarks.faults.findings`. Begin at `__main__.py`; `server.py` has what all
attacks on a live server use.
"""
