"""What a model costs on a device: roofline arithmetic. No torch.

Imported by scheduling/ and `penstock plan`.
Begin with roofline.py; hardware.py and shapes.py hold its tables.
"""
