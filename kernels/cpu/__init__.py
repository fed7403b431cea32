"""The CPU backend: a C++ library that is compiled once for each machine, and how it is called.

Imported by the operators of the parent folder and by workers/execution (cpu_replay.py).
Begin with native.py; csrc/ holds the C++ (begin with operators.cpp).
"""
