"""Which experts a store holds, and the folder in which its files lie."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from dataclasses import astuple, dataclass
from pathlib import Path

from penstock.workers.experts.expert_file import ExpertShare
from penstock.workers.quantization import INT4, Int4Options

HotExpert = tuple[int, int, int]  # layer, expert, steps that needed it


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """Which experts a store holds, and where. Stores of different specs are different actors."""

    app_name: str
    model: str
    weights: str
    device: str  # "cpu" or "cuda": what workers compute on, which settles their dtype
    folder: str
    copies: str = ""  # the format of copies of all experts that the file holds besides; "": none
    is_single: bool = False  # one store for all nodes
    revision: str | None = None  # of the model, where it comes from the hub
    download_dir: str | None = None  # for its files
    int4: Int4Options = INT4  # how experts in int4 are made
    shares: tuple[ExpertShare, ...] = ()  # of the ranks of a group that read it; empty: all experts
    idle_s: float = 60.0  # without a heartbeat of a worker: the store frees its memory and ends

    @property
    def digest(self) -> str:
        return hashlib.blake2b(repr(astuple(self)).encode(), digest_size=6).hexdigest()


def app_folder(folder: str, app_name: str) -> Path:
    """The folder of an application's expert files, on each of its nodes."""
    return Path(folder) / f"penstock-{os.getuid()}-{re.sub(r'[^A-Za-z0-9_-]', '_', app_name)}"


def remove_all(folder: str, app_name: str) -> None:
    """Delete the expert files of an application on this machine, whichever process wrote them."""
    shutil.rmtree(app_folder(folder, app_name), ignore_errors=True)
