"""Batches: files of requests in OpenAI's format, run to exactly one result for each line.

Imported by cli/batch.py and by the ingress's routes for files and batches.
Begin with run.py, then runner.py and part_file.py.
"""
