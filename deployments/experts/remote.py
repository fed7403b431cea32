"""The experts of a store on another node: asked for in batches, through Ray's object store.

What a worker has instead of a map where no copy lies on its node. Each question costs a journey, so
the copier asks for all that waits at once. The store checks digests before it packs. Knows nothing
of slots or of who needs what.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.deployments.experts.client import ExpertStoreClient
from penstock.workers.experts.expert_file import Bytes, Manifest, RowIndices


class RemoteExperts:
    """A `RowSource` over the network."""

    is_remote = True

    def __init__(self, client: ExpertStoreClient, manifest: Manifest):
        self.manifest = manifest
        self._client = client

    def gather(self, requests: Sequence[tuple[int, int, RowIndices]]) -> list[Bytes]:
        """Some rows of each (layer, expert, rows): one question for all.

        Waits for a store that is being restarted. Raises CorruptedExpert, or LoadError if the store
        does not come back.
        """
        packed = self._client.ask(
            "pack", [(layer, e, row_indices) for layer, e, row_indices in requests]
        )
        found, first = [], 0
        for _, expert, row_indices in requests:
            row_bytes = self.manifest.row_bytes_of(expert)
            end = first + len(row_indices) * row_bytes
            found.append(packed[first:end].reshape(len(row_indices), row_bytes))
            first = end
        assert first == len(packed)
        return found

    def rows(self, layer: int, expert: int) -> Bytes:
        return self.gather([(layer, expert, np.arange(self.manifest.num_rows))])[0]

    def at(self, manifest: Manifest) -> RemoteExperts:
        """The same experts in another epoch."""
        return RemoteExperts(self._client, manifest)
