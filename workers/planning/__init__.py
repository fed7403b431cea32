"""What a model costs on a device: roofline arithmetic. No torch.

Imported by scheduling/, models/ and `penstock plan`.
Begin with roofline.py.
"""
