"""`penstock experts`: hit rates and transfers of each worker's expert cache, as a table.

The figures are those of each worker's last heartbeat; no worker is called. With --reload, the
stores read their experts again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from penstock.deployments.cli.server import connect_http
from penstock.deployments.client.tls import ClientTls

Figures = Mapping[str, Any]


def run_experts(url: str, api_key: str | None, tls: ClientTls | None = None) -> int:
    """Print the table; the exit status. Raises ConfigError or ServerError."""
    with connect_http(url, "experts", api_key, tls) as server:
        status = server.get("/v1/penstock/status")
    found = [each for each in status["workers"] if each.get("experts")]
    if not found:
        print("no worker has an expert cache; `penstock serve --expert-cache-gb X` makes one")
        return 1
    has_several = len({each["model"] for each in found}) > 1
    for each in found:
        name = f"{each['id']} of {each['model']}" if has_several else each["id"]
        ranks = "" if each["num_ranks"] == 1 else f", all {each['num_ranks']} ranks"
        print("\n".join(table(f"{name}{ranks}", each["experts"])))
    return 0


def run_reload(url: str, api_key: str | None, tls: ClientTls | None = None) -> int:
    """Reload the expert stores; the exit status: 1 if there is none.

    Raises ConfigError or ServerError.
    """
    with connect_http(url, "experts", api_key, tls) as server:
        stores = server.post("/v1/penstock/experts/reload")["stores"]
    for each in stores:
        print(
            f"{each['name']}: {each['num_experts']:,} experts read again, epoch {each['epoch']}; "
            "workers change to it at their next heartbeat"
        )
    if not stores:
        print("no model keeps its experts in a store")
    return 0 if stores else 1


def table(worker: str, figures: Figures) -> Iterator[str]:
    """The lines of one worker."""
    lookups = figures["num_hits"] + figures["num_partial"] + figures["num_misses"]
    gib = figures["num_slots"] * figures["slot_bytes"] / 2**30
    yield (
        f"worker {worker}: {figures['num_slots']} of {figures['num_experts']} experts fit "
        f"in the cache ({gib:.2f} GiB); expert store epoch {figures['epoch']}"
    )
    yield (
        f"  experts needed {lookups:,}: cached {_percent(figures['num_hits'], lookups)}, partly "
        f"cached {_percent(figures['num_partial'], lookups)}, missing "
        f"{_percent(figures['num_misses'], lookups)}; their rows cached "
        f"{_percent(figures['num_neurons_there'], figures['num_neurons_wanted'])}"
    )
    yield (
        f"  prefetched {figures['num_prefetched']:,}: used "
        f"{_percent(figures['num_prefetch_used'], figures['num_prefetched'])}"
    )
    if figures["num_withheld"]:
        yield f"  nothing prefetched for {figures['num_withheld']:,} layers: the host link was busy"
    if figures["num_pooled_neurons"]:
        yield (
            f"  neurons: {figures['num_pooled_neurons']:,} fit in the pool of answers "
            f"({figures['pool_bytes'] / 2**30:.2f} GiB)"
        )
    if figures["num_sparse_neurons"]:
        yield (
            f"  sparse: {figures['num_sparse_neurons']:,} neurons to choose from, skipped "
            f"{_percent(figures['num_skipped_neurons'], figures['num_sparse_neurons'])}"
        )
    yield (
        f"  copied {figures['demand_bytes'] / 1e9:.2f} GB on demand, "
        f"{figures['prefetch_bytes'] / 1e9:.2f} GB prefetched, in {figures['link_busy_s']:.1f} s; "
        f"steps waited {figures['stall_s']:.1f} s"
    )
    if figures["num_corrupted"]:
        yield f"  {figures['num_corrupted']} loads failed: bytes did not match their digest"
    if figures["by_layer"]:
        yield f"  {'layer':>5} {'predicted':>9} {'same as last token':>20} {'neurons':>9}"
    for each in figures["by_layer"]:
        yield (
            f"  {each['layer']:>5} {_percent(each['num_right'], each['num_routed']):>9} "
            f"{_percent(each['num_repeated'], each['num_repeated_routed']):>20} "
            f"{_percent(each['num_neurons_right'], each['num_neurons']):>9}"
        )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
