"""Tokens and text: tokenizer, detokenizer, chat template, reasoning marks, tool forms. No torch.

Imported by the ingress, engine/, config.py of the deployments and the command line.
Begin with tokenizer.py.
"""
