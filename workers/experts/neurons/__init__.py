"""Neurons of experts one by one: their scores, their thresholds, and a pool that holds their rows.

For `moe_mode: sparse`, and to foresee neurons in exact mode. Imported by experts/ and calibrate.py.
Begin with selection.py, then pool.py and places.py.
"""
