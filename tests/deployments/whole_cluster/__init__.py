"""A cluster with a Ray of its own: these files share that of conftest.py."""
