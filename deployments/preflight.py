"""What can be checked before anything starts: model folder, API keys, certificates, cores, ports.

Cheap: loads no model and asks no hub. Called by `penstock serve` before Ray is imported.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from penstock.deployments.config import ServeConfig
from penstock.deployments.ingress.tracing.opening import check_installed
from penstock.deployments.model_entries import place, within
from penstock.deployments.security.certificates import client_certificates
from penstock.deployments.security.cluster_links import ROLES, ClusterCertificate
from penstock.deployments.security.key_file import read_key_file
from penstock.deployments.security.quotas import check_quotas
from penstock.workers.config import EngineConfig, ModelOptions
from penstock.workers.cpu_affinity import allowed_cores
from penstock.workers.errors import ConfigError, LoadError
from penstock.workers.gguf.header import headers_kept
from penstock.workers.hub_name import hub_name
from penstock.workers.model_config import check_length, read_limits, read_stored_scheme
from penstock.workers.quantization import StoredScheme, check_neurons, weight_plan
from penstock.workers.sampling_defaults import read_sampling_defaults
from penstock.workers.text.chat_settings import check_template, load_tokenizer
from penstock.workers.weights.hub import NAMES, is_hub_id, resolve_model
from penstock.workers.weights.model_digest import verified_folder

RAY_ANSWERS_S = 10.0


def check_before_start(config: ServeConfig) -> None:
    """Raise ConfigError for the first setting that cannot work on this machine."""
    config.check_access()
    if config.models:
        for index, each in enumerate(config.models):
            with within(place(index)):
                _check_one_model(each)
        _check_cores_left(config.models)
    else:
        _check_one_model(config)
    if config.api_keys_file is not None:
        keys = read_key_file(config.api_keys_file)
        check_quotas(keys, config.max_ingress, config.state_url)
    client_certificates(config)
    if config.otlp_traces_endpoint is not None and config.ray_address is None:
        check_installed()
    if config.cluster_certs_dir is not None and config.ray_address is None:
        for role in ROLES:
            ClusterCertificate(config.cluster_certs_dir, role)
    if config.data_dir is not None:
        check_data_dir(Path(config.data_dir).expanduser())
    if config.ray_address is not None:
        check_ray_address(config.ray_address)
        return  # the ports are those of the cluster's machines; in an update they serve already
    for name in ("http_port", "grpc_port"):
        check_port_free(name, config.host, getattr(config, name))


def _check_one_model(config: ServeConfig) -> None:
    """Raise ConfigError unless the model is there, and its settings fit it and this machine."""
    check_model(config.engine.model)
    check_pins(config.engine)
    check_chat_template(config.engine)
    if not is_hub_id(config.engine.model):
        with headers_kept():
            check_formats(config.engine, resolve_model(config.engine.model))
    check_cores(config)
    if config.engine.nodes_per_worker > 1 and config.ray_address is None:
        raise ConfigError(
            f"nodes_per_worker {config.engine.nodes_per_worker} needs a Ray cluster of several "
            "machines: name it with --ray-address, or leave nodes_per_worker out"
        )


def check_formats(engine: EngineConfig, folder: Path) -> None:
    """Raise ConfigError where the model in `folder` is not stored in a way that allows what is
    configured."""
    scheme = read_stored_scheme(folder)
    weight_plan(scheme, engine.weights)
    check_length(engine.max_model_len, read_limits(folder)[1])
    _check_experts(engine, scheme)
    read_sampling_defaults(folder, engine.generation_config)


def _check_cores_left(models: Sequence[ServeConfig]) -> None:
    """Raise ConfigError if the models together reserve every core."""
    reserved = [each.engine.cores for each in models if each.engine.cores]
    if reserved and not allowed_cores().difference(*reserved):
        raise ConfigError(
            "compute_cores of all models are all cores that this process may use; leave at least "
            "one to ingress, gates and Ray"
        )


def check_ray_address(address: str) -> None:
    """Raise ConfigError if nothing listens at HOST:PORT. Ray would try for minutes.

    Other forms ("auto", "ray://...") are left to Ray, which answers at once.
    """
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not (port.isascii() and port.isdigit()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), RAY_ANSWERS_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"ray_address {address}: no Ray cluster answers there "
            f"({getattr(error, 'strerror', None) or error}); start one with `ray start --head`, "
            "whose output names its address, or use auto for the one on this machine"
        ) from None


def check_data_dir(folder: Path) -> None:
    """Make `folder` if it is missing; raise ConfigError unless files can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"data_dir {folder} cannot be written: {error.strerror}; choose a folder that can"
        ) from None


def _check_experts(engine: EngineConfig, scheme: StoredScheme | None) -> None:
    """Raise ConfigError where a setting needs neurons that the weight format cannot give."""
    if engine.moe_mode != "exact":
        who, has_copies = f"moe_mode {engine.moe_mode}", engine.moe_mode == "sparse"
        check_neurons(scheme, engine.weights, who, has_copies=has_copies)
    elif engine.expert_cache_gb is not None and engine.moe_thresholds is not None:
        check_neurons(scheme, engine.weights, "moe_thresholds")


def check_cores(config: ServeConfig) -> None:
    """Raise ConfigError unless `compute_cores` exist, suffice, and leave a core to the rest."""
    cores = config.engine.cores
    if cores is None:
        return
    if config.ray_address is not None:
        raise ConfigError(
            "compute_cores works only where Penstock starts Ray: cores are reserved for processes "
            "started here. On an existing cluster leave it out, and start processes with taskset"
        )
    try:
        allowed = allowed_cores()
    except OSError as error:
        raise ConfigError(f"compute_cores cannot be reserved: {error}") from None
    if not cores < allowed:
        listed = ", ".join(map(str, sorted(allowed)))
        raise ConfigError(
            f"compute_cores {config.engine.compute_cores} must be among the cores that this "
            f"process may use ({listed}), and leave at least one to ingress, gate and Ray"
        )
    if (num := config.max_workers * (config.engine.threads or 1)) > len(cores):
        raise ConfigError(
            f"compute_cores {config.engine.compute_cores} is {len(cores)} cores for {num} threads "
            "(threads x num_workers): name more cores, or use fewer threads"
        )


def check_model(model: str) -> None:
    """Raise ConfigError unless `model` is built in, readable, or looks like a hub id.

    A folder's config.json, or the header of a GGUF file, must name an architecture that Penstock
    knows; tensors are not looked at.
    """
    if model in NAMES:
        try:
            resolve_model(model)
        except LoadError as error:
            raise ConfigError(str(error)) from None
        return
    folder = Path(model).expanduser()
    if not is_hub_id(model):
        read_limits(folder)
    elif folder.exists():
        raise ConfigError(
            f"model {model} is a file; name the folder that contains it, or a GGUF file"
        )
    elif model.startswith(("hf://", "https://huggingface.co/", "http://huggingface.co/")):
        short = model.partition("://")[2].removeprefix("huggingface.co/")
        raise ConfigError(f"model {model}: write the hub id without the address: {short}")
    elif model.startswith((".", "/", "~")) or not _is_possible(model):
        raise ConfigError(
            f"model {model!r} not found: name a local folder, a GGUF file, a hub id such as "
            f"'org/name', {' or '.join(map(repr, NAMES))}"
        )


def _is_possible(model: str) -> bool:
    """Whether the hub may have a model of that name: of an organisation or a user."""
    name = hub_name(model)
    return name is not None and "/" in name.repo


def check_chat_template(options: ModelOptions) -> None:
    """Raise ConfigError if the settings of the chat template do not fit it, or the model here."""
    if options.chat_template is None and options.default_chat_template_kwargs is None:
        return
    if is_hub_id(options.model):
        check_template(options)  # the rest when the model has been fetched
    else:
        load_tokenizer(resolve_model(options.model), options)


def check_pins(options: ModelOptions) -> None:
    """Raise ConfigError if the model's files here are not the ones that were pinned."""
    if is_hub_id(options.model):
        return  # looked at when they are fetched
    try:
        verified_folder(options)
    except LoadError as error:
        raise ConfigError(str(error)) from None


def check_port_free(name: str, host: str, port: int) -> None:
    """Raise ConfigError if another process listens there, or listening is not permitted."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Servers set this too: a port whose last connections are still closing counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            flag = name.replace("_", "-")
            raise ConfigError(
                f"cannot listen on {host}:{port} ({reason}); choose another with --{flag}"
            ) from error
