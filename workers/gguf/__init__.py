"""GGUF files, as far as no tensor is read: their header, and the model's shape in it. No torch.

Imported by model_config, text/ (the tokenizer in a file) and weights/ (its tensors).
Begin with header.py.
"""
