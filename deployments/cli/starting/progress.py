"""How far the workers of a cluster that starts have got, for the terminal that starts it."""

from __future__ import annotations

from collections.abc import Callable

from penstock.deployments.supervision.view import ClusterView
from penstock.workers.progress import shown


class StartProgress:
    """Shows the progress of downloads and loading, and a line for each worker that is ready.

    Workers at `earlier` addresses are of the deployment before.
    """

    def __init__(
        self, say: Callable[[str], None], num_workers: int, earlier: frozenset[str] = frozenset()
    ):
        self._say = say
        self._num_workers = num_workers
        self._known = set(earlier)
        self._num_seen = 0
        self._progress = shown(say)

    def report(self, view: ClusterView) -> None:
        """Show what is new in `view`."""
        if (start := view.start) is not None:
            self._progress(start)
        for info, _ in view.workers:
            if info.address in self._known:
                continue
            self._known.add(info.address)
            self._num_seen += 1
            if self._num_workers > 1:
                self._say(f"worker {self._num_seen} of {self._num_workers} is ready")

    def finish(self) -> None:
        """All have started: fill the bar, if there is one."""
        self._progress.finish()

    def close(self) -> None:
        """End the bar as it is."""
        self._progress.close()
