"""Loads the built-in model when it is imported: once, for all processes that are forked then."""

from __future__ import annotations

from tests.deployments import serving

serving.model()
