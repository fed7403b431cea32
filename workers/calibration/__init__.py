"""4-bit weights calibrated on text: error compensation (GPTQ) and channel scales (AWQ).

Imported by deployments/cli/quantize.py. Begin with checkpoint.py, which goes through the layers.
"""
