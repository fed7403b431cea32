"""Groups of settings of one worker, and the names and folders that some give. Loads no torch.

Imported by config.py, which has the other groups and joins all, and by what checks the name of an
adapter. Begin with device.py.
"""
