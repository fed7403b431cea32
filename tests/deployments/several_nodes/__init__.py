"""One application on several Ray nodes: these files share the cluster of conftest.py."""
