"""A model of the hub before it is served: its commit, and whether Penstock can serve it.

Looks at configuration and tokenizer only; no weights are fetched here.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.deployments.config import ServeConfig
from penstock.workers.config import ModelOptions
from penstock.workers.hub_name import HubName, hub_name
from penstock.workers.model_config import read_limits
from penstock.workers.progress import size
from penstock.workers.text.chat_settings import load_tokenizer
from penstock.workers.weights.hub import commit_of, is_hub_id
from penstock.workers.weights.hub_errors import HubUnreachable
from penstock.workers.weights.hub_files import cache_folder, check_space, download_size
from penstock.workers.weights.model_digest import verified_text

log = logging.getLogger("penstock.app")


@dataclass(frozen=True, slots=True)
class HubModel:
    """What is known of a model of the hub. `config` names its commit."""

    config: ServeConfig
    name: HubName
    text: Path  # folder with configuration and tokenizer, or the GGUF file with both
    num_missing_bytes: int  # to be downloaded to this machine
    folder: str  # to which

    def __str__(self) -> str:
        found = f"{self.name} is at commit {self.name.revision}"
        if not self.num_missing_bytes:
            return f"{found}; its files are in {self.folder}"
        return f"{found}; {size(self.num_missing_bytes)} to download to {self.folder}"


def pinned(config: ServeConfig) -> ServeConfig:
    """The configuration with the commit of a model of the hub: processes that start at different
    times load the same files. Raises LoadError for a model or revision that the hub does not have.

    Where the hub is out of reach and the files are on other machines alone, the revision stays as
    it is: an ingress sends nothing to a worker of another tokenizer.
    """
    if config.models:
        return replace(config, models=tuple(map(pinned, config.models)))
    try:
        return _with_commit(config)
    except HubUnreachable as error:
        log.warning("%s; each process loads the files that it finds", error)
        return config


def look_at(config: ServeConfig) -> HubModel | None:
    """What the hub says of the model; None: it is from elsewhere, or it will run on a cluster, and
    this machine does not reach the hub.

    Raises LoadError or ConfigError for a model that cannot be served as configured, and LoadError
    if this machine will download it and lacks the space.
    """
    if not is_hub_id(config.engine.model):
        return None
    is_here = config.ray_address is None
    options: ModelOptions = config.engine
    if not is_here:  # the folder is one of the cluster's machines
        options = replace(options, download_dir=None)
    try:
        config = _with_commit(config)
        options = replace(options, model=config.engine.model, revision=config.engine.revision)
        text, _ = verified_text(options)
    except HubUnreachable:
        if is_here:
            raise
        return None
    read_limits(text)
    load_tokenizer(text, options)
    name = hub_name(options.model, options.revision)
    assert name is not None, "a hub id has been found"
    folder = cache_folder(options.download_dir)
    missing = download_size(name, text, options.download_dir)
    if is_here:
        check_space(name, missing, folder)
    return HubModel(config, name, text, missing, folder)


def _with_commit(config: ServeConfig) -> ServeConfig:
    engine = config.engine
    commit = commit_of(engine.model, engine.revision, engine.download_dir)
    if commit is None:
        return config
    name = hub_name(engine.model)
    return replace(config, engine=replace(engine, model=str(name), revision=commit))
