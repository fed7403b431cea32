"""Embeddings, and what is ranked by them: OpenAI's embeddings API, vLLM's score, Jina's rerank.

Imported by http/app.py.
Begin with routes.py.
"""
