"""The loop: schedule a step, run it, commit its tokens.

Imported by worker.py, calibrate.py, the command line, and by benchmarks without any server.
Begin with engine.py; thread.py runs it, build.py makes its parts.
"""
