"""The stages of a pipeline-parallel group: which layers a rank has, and how stages hand on rows.

Imported by the loader and by engine/group. Begin with stage.py, then decoder.py.
"""
