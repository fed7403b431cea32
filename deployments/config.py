"""The one configuration of a cluster: a YAML file, and flags made from the same fields.

`ServeConfig` and the `EngineConfig` inside share one flat namespace of settings; flags override the
file. Knows nothing of Ray; what can be checked before anything starts is checked here.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from penstock.workers.config import EngineConfig, from_mapping, option, unknown_setting
from penstock.workers.cpu_affinity import allowed_cores
from penstock.workers.errors import ConfigError
from penstock.workers.model_config import read_limits, read_stored_scheme
from penstock.workers.quantization import StoredScheme, check_neurons, weight_plan
from penstock.workers.text.reasoning import marks_in
from penstock.workers.weights.hub import BUILTIN

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_NUMBER = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?)([kKmMgG]i?)?")
_FACTORS = {"": 1, "k": 1000, "ki": 1024, "m": 1000**2, "mi": 1024**2, "g": 1000**3, "gi": 1024**3}


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything that a cluster needs to know, the workers' part included."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    served_model_name: str | None = option(
        None, "name that clients use for the model; none: the last part of its path or id"
    )
    reasoning_marks: str | None = option(
        "auto",
        "marks around a model's reasoning, which answers to chats keep apart; auto: published ones "
        "that its chat template or tokenizer knows; none; or two, as '<think> </think>'",
    )
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    http_port: int = option(8000, "port of the OpenAI-compatible HTTP interface")
    grpc_port: int = option(8001, "port of the gRPC interface")
    metrics_port: int = option(
        9400, "port of the metrics for Prometheus; each ingress has its own, from here up; 0: none"
    )
    metrics_host: str = option(
        "127.0.0.1", "address that metrics listen on, for whoever reaches it: they want no key"
    )
    api_keys_file: str | None = option(
        None, "file with one API key a line; none: whoever reaches the ports is served"
    )
    num_workers: int = option(
        1, "worker replicas: one per GPU, or sharing the cores of a CPU machine"
    )
    admission: str = option(
        "predicted",
        "who may come in: predicted, as many as fit by the law of their lengths, while others wait "
        "at the gate; reserve_max, as many as fit with their longest answers; optimistic, all at "
        "once, and workers preempt (docs/gate.md)",
        ("predicted", "reserve_max", "optimistic"),
    )
    max_queued: int = option(1024, "requests that may wait at the gate before it refuses more")
    longest_wait_s: float | None = option(
        None, "seconds; who would wait longer is refused at once; none: only by its own deadline"
    )
    gate_answer_ms: float | None = option(
        None,
        "milliseconds that the gate has for its first word, before a request goes without it; "
        "none: 20, or 200 where workers compute on the CPUs that it needs",
    )
    predictor_file: str | None = option(
        None, "file that keeps what was learnt of answers' lengths; none: until the cluster ends"
    )
    num_ingress: int = option(1, "ingress replicas; those on one machine share the ports")
    app_name: str = option("penstock", "name of the Ray Serve application")
    ray_address: str | None = option(
        None, "Ray cluster to run on ('auto': the one of this machine); none: start one here"
    )
    ray_dir: str | None = option(
        None,
        "folder for the logs of a cluster started here; none: a temporary one, removed at exit",
    )
    drain_s: float = option(10.0, "seconds that requests under way have to end, at shutdown")
    log_level: str = option(
        "info", "least severe messages to log", ("debug", "info", "warning", "error")
    )

    def with_absolute_paths(self) -> ServeConfig:
        """The same, for processes that do not run in this one's folder."""
        changes: dict[str, Any] = {}
        folder = Path(self.engine.model).expanduser()
        if self.engine.model not in BUILTIN and folder.is_dir():
            changes["engine"] = dataclasses.replace(self.engine, model=str(folder.resolve()))
        if self.api_keys_file is not None:
            changes["api_keys_file"] = str(Path(self.api_keys_file).expanduser().resolve())
        if self.predictor_file is not None:
            changes["predictor_file"] = str(Path(self.predictor_file).expanduser().resolve())
        return dataclasses.replace(self, **changes)

    def __post_init__(self) -> None:
        if self.reasoning_marks not in (None, "auto"):
            marks_in(self.reasoning_marks)
        for name in ("num_workers", "num_ingress", "max_queued"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1; got {getattr(self, name)}")
        for name in ("http_port", "grpc_port"):
            if not 1 <= getattr(self, name) <= 65535:
                raise ConfigError(f"{name} must lie in 1 ... 65535; got {getattr(self, name)}")
        if not 0 <= self.metrics_port <= 65535:
            raise ConfigError(f"metrics_port must lie in 0 ... 65535; got {self.metrics_port}")
        if self.metrics_port in (self.http_port, self.grpc_port):
            raise ConfigError(f"metrics_port must differ from the others; got {self.metrics_port}")
        if self.http_port == self.grpc_port:
            raise ConfigError(f"http_port and grpc_port must differ; both are {self.http_port}")
        for name in ("gate_answer_ms", "longest_wait_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be positive; got {value}")
        if self.drain_s < 0:
            raise ConfigError(f"drain_s must not be negative; got {self.drain_s}")

    @property
    def model_name(self) -> str:
        """The name under which clients ask for the model."""
        return self.served_model_name or self.engine.model.rstrip("/").rsplit("/", 1)[-1]

    def address(self, port: int) -> str:
        """host:port, as URLs and gRPC write it."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    @property
    def is_open(self) -> bool:
        """Whether strangers on the network could use this server: no keys, and not loopback."""
        return self.api_keys_file is None and self.host not in LOOPBACK


@dataclass(frozen=True, slots=True)
class Setting:
    """One entry of the flat namespace: where it lives and what values it takes."""

    name: str
    owner: type
    kind: type  # int, float, bool or str
    optional: bool
    default: Any
    help: str
    choices: tuple[str, ...] | None

    def parse(self, value: Any) -> Any:
        """`value` (of YAML, or the text of a flag) as the field's type. Raises ConfigError."""
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            if self.optional:
                return None
            raise ConfigError(f"{self.name} needs a value")
        if self.kind is bool:
            if isinstance(value, bool):
                return value
            raise ConfigError(f"{self.name} must be true or false; got {value!r}")
        if self.kind is str:
            if isinstance(value, bool) and {"on", "off"} <= {*(self.choices or ())}:
                return "on" if value else "off"  # as YAML reads these words
            if isinstance(value, str | int | float) and not isinstance(value, bool):
                return str(value)
            raise ConfigError(f"{self.name} must be text; got {value!r}")
        return self._number(value)

    def _number(self, value: Any) -> int | float:
        number = None
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
        elif isinstance(value, str) and (match := _NUMBER.fullmatch(value.strip())):
            number = float(match[1]) * _FACTORS[(match[2] or "").lower()]
        if number is not None and self.kind is float:
            return number
        if number is not None and abs(number - round(number)) < 1e-6:
            return round(number)
        what = "a whole number, as 4096, 25.6k or 2M" if self.kind is int else "a number"
        raise ConfigError(f"{self.name} must be {what}; got {value!r}")


def settings() -> Iterator[Setting]:
    """All settings: the cluster's, then the engine's."""
    for owner in (ServeConfig, EngineConfig):
        hints = typing.get_type_hints(owner)
        for each in dataclasses.fields(owner):
            if "help" not in each.metadata:  # the nested EngineConfig
                continue
            kinds = typing.get_args(hints[each.name]) or (hints[each.name],)
            yield Setting(
                name=each.name,
                owner=owner,
                kind=next(kind for kind in kinds if kind is not types.NoneType),
                optional=types.NoneType in kinds,
                default=each.default,
                help=each.metadata["help"],
                choices=each.metadata["choices"],
            )


def config_from(values: Mapping[str, Any]) -> ServeConfig:
    """A ServeConfig of flat settings. Raises ConfigError naming the key and the remedy."""
    known = {setting.name: setting for setting in settings()}
    of_owner: dict[type, dict[str, Any]] = {ServeConfig: {}, EngineConfig: {}}
    for name, value in values.items():
        if name not in known:
            raise unknown_setting(name, known)
        of_owner[known[name].owner][name] = known[name].parse(value)
    engine = from_mapping(EngineConfig, of_owner[EngineConfig])
    return from_mapping(ServeConfig, {"engine": engine, **of_owner[ServeConfig]})


def read_config(path: str) -> dict[str, Any]:
    """The settings of a YAML file. Raises ConfigError if it cannot be read as a mapping."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path} must hold settings as 'name: value', one a line")
    return {key.replace("-", "_"): value for key, value in values.items()}


def read_api_keys(path: str) -> tuple[str, ...]:
    """The keys in a file: one a line, blank lines and '#' comments left out."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read api_keys_file {path}: {error.strerror}") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"api_keys_file {path} holds no key; write one a line")
    return keys


def check_before_start(config: ServeConfig) -> None:
    """Find what cannot work before anything is started: model folder, keys file, ports.

    Raises ConfigError. Cheap: loads no model and asks no hub.
    """
    check_model(config.engine.model)
    folder = Path(config.engine.model).expanduser()
    if folder.is_dir():
        scheme = read_stored_scheme(folder)
        weight_plan(scheme, config.engine.weights)
        _check_experts(config.engine, scheme)
    check_cores(config)
    if config.api_keys_file is not None:
        read_api_keys(config.api_keys_file)
    for name in ("http_port", "grpc_port"):
        check_port_free(name, config.host, getattr(config, name))


def _check_experts(engine: EngineConfig, scheme: StoredScheme | None) -> None:
    """Raise ConfigError where experts are wanted by neurons that cannot be had so."""
    if engine.moe_mode != "exact":
        check_neurons(scheme, engine.weights, f"moe_mode {engine.moe_mode}")
    elif engine.expert_cache_gb is not None and engine.moe_thresholds is not None:
        check_neurons(scheme, engine.weights, "moe_thresholds")


def check_cores(config: ServeConfig) -> None:
    """Raise ConfigError unless the workers can have `compute_cores`, and leave some to the rest."""
    cores = config.engine.cores
    if cores is None:
        return
    if config.ray_address is not None:
        raise ConfigError(
            "compute_cores is for a cluster that is started here; on one that exists leave it out, "
            "and keep its processes off cores where they are started, as with taskset"
        )
    try:
        allowed = allowed_cores()
    except OSError as error:
        raise ConfigError(f"compute_cores cannot be kept: {error}") from None
    if not cores < allowed:
        listed = ", ".join(map(str, sorted(allowed)))
        raise ConfigError(
            f"compute_cores {config.engine.compute_cores} must be some of the cores that this "
            f"process may use ({listed}), and leave one at least to ingress, gate and Ray"
        )
    if (num := config.num_workers * (config.engine.threads or 1)) > len(cores):
        raise ConfigError(
            f"compute_cores {config.engine.compute_cores} is {len(cores)} cores for {num} threads "
            "(threads x num_workers): give as many cores, or fewer threads"
        )


def check_model(model: str) -> None:
    """Raise ConfigError unless `model` is built in, a readable folder, or maybe a hub id.

    A folder's config.json must name an architecture that Penstock knows; tensors are not looked at.
    """
    if model in BUILTIN:
        return
    folder = Path(model).expanduser()
    if folder.is_dir():
        read_limits(folder)
    elif folder.exists():
        raise ConfigError(f"model {model} is a file; give the folder that it is in")
    elif model.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(model):
        raise ConfigError(
            f"model {model!r} not found: give a local folder, a hub id such as 'org/name', "
            f"{' or '.join(map(repr, BUILTIN))}"
        )


def check_port_free(name: str, host: str, port: int) -> None:
    """Raise ConfigError if somebody listens there, or nobody may."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connections are still closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            flag = name.replace("_", "-")
            raise ConfigError(
                f"cannot listen on {host}:{port} ({reason}); choose another with --{flag}"
            ) from error
