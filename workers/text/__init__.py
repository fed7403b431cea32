"""Tokens and text: tokenizer, detokenizer, chat template, reasoning marks. No torch.

Imported by the ingress, worker.py, the benchmarks and the command line.
Begin with tokenizer.py.
"""
