"""The configuration of a cluster: `ServeConfig`, filled from a YAML file and from flags.

`ServeConfig` and the `EngineConfig` inside it share one flat namespace of settings; flags override
the file. What can be checked against the machine before anything starts is preflight.py's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from penstock.workers.config import EngineConfig
from penstock.workers.errors import ConfigError
from penstock.workers.settings import (
    Setting,
    check_settings,
    option,
    settings_of,
    unknown_setting,
)
from penstock.workers.text.reasoning import marks_in
from penstock.workers.weights.hub import BUILTIN

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class ServedModelOptions:
    """How clients see the model."""

    GROUP: ClassVar[str] = "model"

    served_model_name: str | None = option(
        None, "model name in the API; none: the last part of the model's path or id"
    )
    reasoning_marks: str | None = option(
        "auto",
        "marks around a model's reasoning, which chat answers return in a separate field; auto: "
        "the published marks that its chat template or tokenizer contains; none: no separation; "
        "or two marks, as '<think> </think>'",
    )


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Where clients and Prometheus connect."""

    GROUP: ClassVar[str] = "listeners"

    host: str = option(
        "127.0.0.1", "address to listen on for HTTP and gRPC; 0.0.0.0: all interfaces"
    )
    http_port: int = option(8000, "port of the OpenAI-compatible HTTP API", min=1, max=65535)
    grpc_port: int = option(8001, "port of the gRPC API", min=1, max=65535)
    api_keys_file: str | None = option(
        None,
        "file with one API key a line; none: every client that can reach the ports is served",
    )
    metrics_port: int = option(
        9400,
        "port of the Prometheus metrics; further ingress replicas on a machine use the next free "
        "ports; 0: no metrics",
        min=0,
        max=65535,
    )
    metrics_host: str = option(
        "127.0.0.1", "address to listen on for metrics, which need no API key"
    )


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """How many replicas there are."""

    GROUP: ClassVar[str] = "replicas and machine"

    num_workers: int = option(
        1, "worker replicas; each has one GPU, or an equal share of a machine's CPUs", min=1
    )
    num_ingress: int = option(
        1, "ingress replicas; those on one machine share the HTTP and gRPC ports", min=1
    )


@dataclass(frozen=True, kw_only=True)
class AdmissionOptions:
    """When a request may run, and when it waits or is refused."""

    GROUP: ClassVar[str] = "admission"

    admission: Literal["predicted", "reserve_max", "optimistic"] = option(
        "predicted",
        "when a request is admitted to a worker; predicted: when its predicted peak of KV memory "
        "fits; reserve_max: when its longest possible answer fits; optimistic: at once, and "
        "workers preempt when memory runs out (docs/design/gate.md)",
    )
    max_queued: int = option(
        1024, "maximum requests that wait at the gate; more are refused", min=1
    )
    longest_wait_s: float | None = option(
        None,
        "refuse a request at once if it would wait longer than this many seconds; none: only its "
        "own deadline counts",
        above=0,
    )
    gate_answer_ms: float | None = option(
        None,
        "milliseconds in which the gate must answer, before a request goes to the least-loaded "
        "worker without it; none: 20, or 200 on machines where workers compute on the CPUs",
        above=0,
    )
    predictor_file: str | None = option(
        None,
        "file that keeps the learnt answer lengths across restarts; none: they are lost when the "
        "cluster ends",
    )


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """Ray, logs and shutdown."""

    GROUP: ClassVar[str] = "cluster"

    ray_address: str | None = option(
        None,
        "address of the Ray cluster to use; auto: the one running on this machine; none: start "
        "Ray here",
    )
    ray_dir: str | None = option(
        None,
        "folder for Ray's files and logs, if Ray is started here; none: a temporary folder, "
        "removed at exit",
    )
    app_name: str = option("penstock", "name of the Ray Serve application")
    drain_s: float = option(10.0, "seconds that running requests have to finish at shutdown", min=0)
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "least severe level to log"
    )


@dataclass(frozen=True, kw_only=True)
class ServeConfig(
    ServedModelOptions,
    ListenOptions,
    ReplicaOptions,
    AdmissionOptions,
    ClusterOptions,
):
    """Everything that a cluster needs to know; `engine` is for its workers. Raises ConfigError."""

    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.reasoning_marks not in (None, "auto"):
            marks_in(self.reasoning_marks)
        if self.metrics_port in (self.http_port, self.grpc_port):
            raise ConfigError(
                f"metrics_port must differ from http_port and grpc_port; got {self.metrics_port}"
            )
        if self.http_port == self.grpc_port:
            raise ConfigError(f"http_port and grpc_port must differ; both are {self.http_port}")

    @property
    def model_name(self) -> str:
        """The name by which clients address the model."""
        return self.served_model_name or self.engine.model.rstrip("/").rsplit("/", 1)[-1]

    @property
    def is_open(self) -> bool:
        """Whether other machines can use this server without a key."""
        return self.api_keys_file is None and self.host not in LOOPBACK

    def address(self, port: int) -> str:
        """host:port, as URLs and gRPC write it."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    def with_absolute_paths(self) -> ServeConfig:
        """The same configuration for processes with another working directory."""
        changes: dict[str, Any] = {}
        folder = Path(self.engine.model).expanduser()
        if self.engine.model not in BUILTIN and folder.is_dir():
            changes["engine"] = dataclasses.replace(self.engine, model=str(folder.resolve()))
        for name in ("api_keys_file", "predictor_file"):
            if (path := getattr(self, name)) is not None:
                changes[name] = str(Path(path).expanduser().resolve())
        return dataclasses.replace(self, **changes)


def settings() -> tuple[Setting, ...]:
    """All settings: the cluster's, then the engine's."""
    return (*settings_of(ServeConfig), *settings_of(EngineConfig))


def settings_by_group() -> dict[str, list[Setting]]:
    """The settings under the titles of their groups, in the order of `--help`."""
    groups: dict[str, list[Setting]] = {}
    for setting in settings():
        groups.setdefault(setting.group, []).append(setting)
    return groups


def config_from(values: Mapping[str, Any]) -> ServeConfig:
    """A ServeConfig of flat settings. Raises ConfigError naming the setting and the remedy."""
    known = {setting.name: setting for setting in settings()}
    of_engine = {setting.name for setting in settings_of(EngineConfig)}
    cluster: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            raise unknown_setting(name, known)
        (engine if name in of_engine else cluster)[name] = known[name].parse(value)
    return ServeConfig(engine=EngineConfig(**engine), **cluster)


def read_config(path: str) -> dict[str, Any]:
    """The settings in a YAML file. Raises ConfigError unless it maps names to values."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path} must contain settings as 'name: value', one a line")
    return {key.replace("-", "_"): value for key, value in values.items()}


def read_api_keys(path: str) -> tuple[str, ...]:
    """The keys in a file, one a line, without blank lines and '#' comments. Raises ConfigError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read api_keys_file {path}: {error.strerror}") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"api_keys_file {path} has no key; write one a line")
    return keys
