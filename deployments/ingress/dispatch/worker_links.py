"""The workers that one ingress knows, by the registry's list: which take requests, and which first.

pool.py sends requests to them; worker_link.py is the connection with one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from penstock.deployments.gate.forecast.prefix_affinity import PrefixAffinity
from penstock.deployments.ingress.core.admission_request import AdmissionRequest
from penstock.deployments.ingress.dispatch.in_flight import InFlightRequest
from penstock.deployments.ingress.dispatch.local_queue import share_of
from penstock.deployments.ingress.dispatch.worker_link import WorkerLink, WorkerLinkHandlers
from penstock.workers.channel.encrypted import TlsSource
from penstock.workers.stats import WorkerInfo, digest_in

log = logging.getLogger("penstock.channel")

REPLACED_S = 2.0  # a worker that replaces a draining one is listed and connected by then
REACH_S = 1.0  # longest from a ticket to the connection with its worker, if that has just started


class WorkerLinks:
    """The connections of one ingress with its workers. Lives on one event loop."""

    def __init__(
        self,
        ingress_id: str,
        owner: WorkerLinkHandlers,
        tokenizer_digest: str,
        tls: TlsSource | None = None,
    ):
        """`owner`: gets what happens on the links. `tokenizer_digest`: of the workers that may be
        used; empty: of any. `tls`: as WorkerLink has it."""
        self.by_epoch: dict[int, WorkerLink] = {}
        self._ingress_id, self._owner = ingress_id, owner
        self._tokenizer_digest, self._tls = tokenizer_digest, tls
        self._foreign: set[int] = set()  # epochs that cannot be used
        self._left_s = float("-inf")  # when a worker last drained, or its connection ended
        self._num_ingresses = 1
        self._turn = itertools.count(1)
        self._prefixes: PrefixAffinity[int] = PrefixAffinity()  # by epoch

    def update(self, workers: Iterable[WorkerInfo], num_ingresses: int) -> None:
        """Take the registry's newest list: connect with new workers.

        `num_ingresses`: living ones, this one among them, which share the workers.

        A worker that is no longer listed gets no new requests while others are; its stream ends
        when the worker ends it, for the registry may be wrong and the stream is not. One that
        drains gets none at all.
        """
        self._num_ingresses = max(num_ingresses, 1)
        listed = {info.epoch: info for info in workers}
        for epoch, link in list(self.by_epoch.items()):
            link.is_listed = epoch in listed
            if link.is_listed and listed[epoch].is_draining:
                link.is_draining = True
            if link.is_draining:
                self._left_s = asyncio.get_running_loop().time()
            if link.task is not None and link.task.done():
                del self.by_epoch[epoch]
        for epoch in listed.keys() - self.by_epoch.keys():
            if listed[epoch].is_draining:  # nothing of this ingress runs there
                continue
            if self._is_foreign(listed[epoch]):
                continue
            link = WorkerLink(listed[epoch], self._ingress_id, self._owner, self._tls)
            link.task = asyncio.ensure_future(link.run())
            self.by_epoch[epoch] = link

    def _is_foreign(self, info: WorkerInfo) -> bool:
        """Whether token ids mean something else to that worker, or it connects otherwise."""
        why = self._difference(info)
        if why and info.epoch not in self._foreign:
            self._foreign.add(info.epoch)
            log.warning("worker %s gets no requests from here: %s", info.address, why)
        return bool(why)

    def _difference(self, info: WorkerInfo) -> str:
        own, its = self._tokenizer_digest, info.tokenizer_digest
        if own and its and own != its:
            return (
                f"it has another tokenizer than this ingress (digest {its}, not {own}). In an "
                "update this passes; else compare the model's files"
            )
        has_tls = self._tls is not None
        if info.is_encrypted != has_tls:
            its, own = ("has", "has not") if info.is_encrypted else ("has not", "has")
            return (
                f"it {its} cluster_certs_dir, and this ingress {own}. In an update this passes; "
                "else give all machines the same settings"
            )
        return ""

    @property
    def num_connected(self) -> int:
        return sum(link.is_connected for link in self.by_epoch.values())

    def has_any(self) -> bool:
        """Whether a worker takes requests now."""
        return any(link.takes_requests for link in self.by_epoch.values())

    def lives(self, epoch: int) -> bool:
        """Whether the worker of that epoch is connected."""
        link = self.by_epoch.get(epoch)
        return link is not None and link.is_connected

    def has_lost(self, epoch: int) -> bool:
        """Whether the worker of that epoch was connected, and is not any more."""
        link = self.by_epoch.get(epoch)
        return link is not None and link.was_connected and not link.is_connected

    def usable(self, call: InFlightRequest | None = None) -> list[WorkerLink]:
        """Those that take requests; of these, those that are listed, and have their experts, if
        any is and has. Of other weights than `call` has begun with, none."""
        links = [link for link in self.by_epoch.values() if link.takes_requests]
        if call is not None:
            links = [link for link in links if call.fits(link.info.computes)]
        links = [link for link in links if not link.lacks_experts] or links
        return [link for link in links if link.is_listed] or links

    def is_bound(self, call: InFlightRequest) -> bool:
        """Whether `call` may go to some workers only, as others would change its answer."""
        return any(
            link.takes_requests and not call.fits(link.info.computes)
            for link in self.by_epoch.values()
        )

    def have_changed(self, call: InFlightRequest) -> bool:
        """Whether all workers have other files of the model than those that `call` began with, as
        after an update. Of other number formats alone, one that fits may still come back."""
        own = digest_in(call.computes)
        links = [each for each in self.by_epoch.values() if each.is_listed and not each.is_draining]
        others = [each.info.model_digest not in ("", own) for each in links]
        return own != "" and bool(others) and all(others)

    def with_room(self, call: InFlightRequest) -> list[WorkerLink]:
        """Usable ones of which this ingress has less than its share."""
        return [
            link
            for link in self.usable(call)
            if link.num_calls < share_of(link.max_num_seqs, self._num_ingresses)
        ]

    def note(self, link: WorkerLink, call: InFlightRequest) -> None:
        """`call` goes to the worker of `link`, which gets the prefix of its prompt."""
        link.last_turn = next(self._turn)
        self._prefixes.note(
            call.admission.prefix, link.info.epoch, call.num_expected, link.capacity
        )

    def forget(self, link: WorkerLink) -> None:
        """The connection with its worker has ended."""
        self._prefixes.forget(link.info.epoch)
        self._left_s = max(self._left_s, link.ended_s)

    def by_work(self, links: Sequence[WorkerLink], admission: AdmissionRequest) -> list[WorkerLink]:
        """Fewest tokens to compute first; a cached prefix of the prompt need not be computed."""
        hits = self._prefixes.hits(admission.prefix) if len(links) > 1 else {}

        def work(link: WorkerLink) -> tuple[int, int]:
            return link.num_outstanding - hits.get(link.info.epoch, 0), link.last_turn

        return sorted(links, key=work)

    def limited(self, admission: AdmissionRequest) -> AdmissionRequest:
        """Where the client set no limit, the limit is what the longest worker has room for."""
        if admission.has_limit or admission.ceiling is not None or not self.by_epoch:
            return admission
        longest = max(link.info.max_model_len for link in self.by_epoch.values())
        limit = max(longest - len(admission.request.prompt_ids), 1)
        features = admission.features
        if features.max_tokens is not None:
            limit = min(limit, features.max_tokens)
        return replace(admission, features=replace(features, max_tokens=limit))

    async def replaced(self) -> None:
        """Where no worker takes requests, but one soon may, wait a moment for it.

        In a rolling update, the worker that replaces the last old one is known a moment later, also
        where that one is killed; and from a worker that is listed to the connection with it takes
        another moment.
        """
        loop = asyncio.get_running_loop()
        if self.usable():
            return
        is_draining = any(link.is_draining for link in self.by_epoch.values())
        is_new = any(each.is_listed and not each.was_connected for each in self.by_epoch.values())
        if not (is_draining or is_new) and loop.time() > self._left_s + REPLACED_S:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPLACED_S):
                while not self.usable():
                    await asyncio.sleep(0.02)

    async def reachable(self, epoch: int) -> WorkerLink | None:
        """The connection with a worker that the gate knew first, once there is one."""
        for _ in range(round(REACH_S / 0.02)):
            link = self.by_epoch.get(epoch)
            if link is not None and link.takes_requests:
                return link
            await asyncio.sleep(0.02)
        return None

    async def close(self) -> None:
        """End all connections."""
        tasks = [link.task for link in self.by_epoch.values() if link.task is not None]
        self.by_epoch.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
