"""Programs that maintain this repository: they render pages and check them.

Run from the repository root as `python -m tools.NAME`; no package of the product imports them.
Begin with `render_results.py`.
"""
