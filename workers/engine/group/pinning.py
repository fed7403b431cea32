"""The cores of each rank of a group, on a machine with several NUMA nodes."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from penstock.workers.config import EngineConfig
from penstock.workers.cpu_affinity import allowed_cores, cores_of_rank, numa_nodes

log = logging.getLogger("penstock.engine")


def pinned(config: EngineConfig, device: str, place: int) -> EngineConfig:
    """`config` of the rank at `place` among those of this machine, with the cores that it alone
    computes on; unchanged where ranks share all cores. `threads` of `config` are one rank's.

    Called before this thread is pinned. A model's memory comes from the NUMA node whose threads
    write it first: so keep to the cores before the model is loaded.
    """
    num_here = config.num_ranks // config.nodes_per_worker
    if device != "cpu" or num_here == 1:
        return config
    nodes = numa_nodes(config.cores or allowed_cores())
    cores = cores_of_rank(place, num_here, config.threads or torch.get_num_threads(), nodes)
    if cores is None:
        if len(nodes) > 1:
            log.warning(
                "%d ranks with %s threads each do not fit into %d NUMA nodes of %s cores: they are "
                "not pinned; set threads to the cores of one node, times the ranks on it",
                num_here,
                config.threads,
                len(nodes),
                ", ".join(str(len(each)) for each in nodes),
            )
        return config
    log.info("rank %d of this machine computes on the cores %s", place, sorted(cores))
    return replace(config, compute_cores=",".join(map(str, sorted(cores))))
