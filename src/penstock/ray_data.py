"""Ray Data sets answered by a Penstock server; see penstock.deployments.ray_data."""

from penstock.deployments.ray_data import build_processor

__all__ = ["build_processor"]
