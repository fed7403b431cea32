"""vLLM's flags of `serve`, and what each is here. Pure: no parser, no engine.

Begin with table.py. The parser of `serve`, config files, `penstock.LLM` and docs/reference/vllm.md
use it.
"""
