"""The Python client over gRPC: `Client` and `AsyncClient`.

Imported by users, cli/ and bench/; this package alone re-exports its public names.
Begin with client.py; types.py has its arguments and results.
"""

from penstock.deployments.client.client import AsyncClient, Client, ClientError
from penstock.deployments.client.types import (
    Answer,
    FinishReason,
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
    "FinishReason",
    "Model",
    "Piece",
    "Timings",
    "ToolCall",
]
