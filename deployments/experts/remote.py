"""Reads the experts of a store on another node, in batches, through Ray's object store.

Used by a worker whose node has no expert file. Each call is a network round trip, so the copier
requests all queued rows at once. The store checks digests before it packs rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.deployments.experts.client import ExpertStoreClient
from penstock.workers.errors import StoreUnavailable
from penstock.workers.experts.expert_file import Bytes, Manifest, RowIndices


class RemoteExperts:
    """A `RowSource` over the network."""

    is_remote = True

    def __init__(self, client: ExpertStoreClient, manifest: Manifest):
        self.manifest = manifest
        self._client = client

    def gather(self, requests: Sequence[tuple[int, int, RowIndices]]) -> list[Bytes]:
        """Some rows of each (layer, expert, rows), with one call.

        Waits some seconds for a store that is being restarted. Raises CorruptedExpert, or
        StoreUnavailable if the store does not answer in time.
        """
        packed = self._client.pack(requests)
        found, first = [], 0
        for _, expert, row_indices in requests:
            row_bytes = self.manifest.row_bytes_of(expert)
            end = first + len(row_indices) * row_bytes
            found.append(packed[first:end].reshape(len(row_indices), row_bytes))
            first = end
        if first != len(packed):
            raise StoreUnavailable(
                f"the expert store sent {len(packed)} bytes where {first} were asked for: it has "
                "another version, or other experts"
            )
        return found

    def rows(self, layer: int, expert: int) -> Bytes:
        return self.gather([(layer, expert, np.arange(self.manifest.num_rows_of(expert)))])[0]

    def at(self, manifest: Manifest) -> RemoteExperts:
        """The same experts in another epoch."""
        return RemoteExperts(self._client, manifest)
