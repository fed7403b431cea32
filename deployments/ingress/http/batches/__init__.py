"""OpenAI's Files and Batches APIs, over the stores and the executor of deployments/batch/.

Imported by http/app.py.
Begin with routes.py, then upload.py.
"""
