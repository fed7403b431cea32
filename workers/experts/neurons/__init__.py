"""Neurons of experts one by one: their scores, their thresholds, and a pool that holds their rows.

Begin with selection.py, then pool.py. For `moe_mode: sparse`, and to foresee neurons in exact mode.
"""
