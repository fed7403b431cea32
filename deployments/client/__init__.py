"""The Python client over gRPC: `Client` and `AsyncClient`.

Imported by users, cli/ and bench/; this package alone re-exports its public names.
Begin with client.py; types.py holds what it returns.
"""

from penstock.deployments.client.client import AsyncClient, Client, ClientError
from penstock.deployments.client.types import (
    Answer,
    Model,
    Piece,
    Timings,
    ToolCall,
)

__all__ = [
    "Answer",
    "AsyncClient",
    "Client",
    "ClientError",
    "Model",
    "Piece",
    "Timings",
    "ToolCall",
]
