"""Tokens and text: tokenizer, detokenizer, chat template, reasoning marks. No torch.

Imported by the ingress and by worker.py.
Begin with tokenizer.py.
"""
