"""The settings of the processors that compute for one worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from penstock.workers.cpu_affinity import parse_cores
from penstock.workers.settings import option

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The processor that computes."""

    GROUP: ClassVar[str] = "replicas and machine"

    device: Device = option(
        "auto", "device that computes; auto: cuda if the machine has a GPU, else cpu"
    )
    threads: int | None = option(
        None, "CPU threads of one worker; none: one for each core that the worker gets", min=1
    )
    tensor_parallel_size: int = option(
        1,
        "processes that share one worker's model, each with some of its heads and columns; results "
        "are those of one process, bit for bit. On GPUs each has one; not yet run on several GPUs",
        min=1,
    )
    enable_expert_parallel: bool = option(
        False,
        "each of tensor_parallel_size processes has some routed experts whole, and not some "
        "columns of all: half the messages, but those wait whose experts are not chosen; always "
        "so with expert_cache_gb, and where experts are too narrow for the processes",
    )
    pipeline_parallel_size: int = option(
        1,
        "stages that share one worker's layers, each of tensor_parallel_size processes; rows "
        "travel once from stage to stage, so that slow links do; results are those of one process, "
        "bit for bit. On GPUs not yet run",
        min=1,
    )
    nodes_per_worker: int = option(
        1,
        "machines of the Ray cluster that have an equal share of a worker's ranks each, stage by "
        "stage; their network must be private, and fast where tensor_parallel_size spans it: all "
        "rows then travel over it four times a layer",
        min=1,
    )
    compute_cores: str | None = option(
        None,
        "cores reserved for the workers' compute threads, in taskset's syntax: 1, or 2-7,9; all "
        "other processes that Penstock starts here stay off them; none: no core is reserved",
    )

    @property
    def num_ranks(self) -> int:
        """Processes that compute for one worker."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def group_name(self) -> str:
        """The settings that ask for them, for errors."""
        names = ("tensor_parallel_size", "pipeline_parallel_size")
        return " and ".join(f"{n} {getattr(self, n)}" for n in names if getattr(self, n) > 1)

    @property
    def cores(self) -> frozenset[int] | None:
        """`compute_cores` as core numbers; None where none are reserved. Raises ValueError."""
        return None if self.compute_cores is None else parse_cores(self.compute_cores)
