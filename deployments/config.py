"""The configuration of a cluster: `ServeConfig`, filled from a YAML file and from flags.

`ServeConfig` and the `EngineConfig` inside it share one flat namespace of settings; flags override
the file. With several models, each has a ServeConfig of its own (model_entries.py). What can be
checked against the machine before anything starts is preflight.py's.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.deployments.model_entries import (
    MODELS,
    Entry,
    check_together,
    key_of,
    place,
    split,
    within,
)
from penstock.deployments.options import (
    ANY_NAME,
    AUTO_FILE,
    AdmissionOptions,
    BatchOptions,
    ClusterOptions,
    ListenOptions,
    ReplicaOptions,
    SecurityOptions,
    ServedModelOptions,
    StateOptions,
    TraceOptions,
)
from penstock.deployments.state import url as state_url
from penstock.workers.config import EngineConfig
from penstock.workers.errors import ConfigError
from penstock.workers.hub_name import hub_name
from penstock.workers.settings import (
    Setting,
    check_settings,
    settings_of,
    unknown_setting,
)
from penstock.workers.text.reasoning import marks_in
from penstock.workers.text.tool_forms import form_named
from penstock.workers.weights.hub import NAMES, is_hub_id

WAIT_S = 120.0  # OpenAI's clients take a Retry-After of no more, and give up after 600 s
WAIT_FROM_ZERO_S = 600.0  # where a worker, and perhaps its node, must be started first
ANY_ORIGIN = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\\\s?#@,*A-Z]+")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PATHS = (
    *("api_keys_file", "predictor_file", "data_dir"),
    *("state_password_file", "state_ca_file", "state_cert_file", "state_key_file"),
    *("tls_cert_file", "tls_key_file", "tls_client_ca_file", "cluster_certs_dir"),
)


@dataclass(frozen=True, kw_only=True)
class ServeConfig(
    ServedModelOptions,
    ListenOptions,
    SecurityOptions,
    ReplicaOptions,
    AdmissionOptions,
    BatchOptions,
    StateOptions,
    TraceOptions,
    ClusterOptions,
):
    """Everything that a cluster needs to know; `engine` is for its workers. Raises ConfigError.

    `models`: of several models, the configuration of each, complete, with what all share; here
    are then the defaults of what each may have for itself. `key` is that of a model among several.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    models: tuple[ServeConfig, ...] = ()
    key: str = ""

    def __post_init__(self) -> None:
        check_settings(self)
        check_together(
            [
                Entry(
                    *(each.model_name, each.other_names, each.key),
                    each.predictor_file if each.predictor_file != AUTO_FILE else None,
                    each.engine.cores,
                )
                for each in self.models
            ]
        )
        if self.reasoning_marks not in (None, "auto"):
            marks_in(self.reasoning_marks)
        form_named(self.tool_call_parser)
        if self.metrics_port in (self.http_port, self.grpc_port):
            raise ConfigError(
                f"metrics_port must differ from http_port and grpc_port; got {self.metrics_port}"
            )
        if self.http_port == self.grpc_port:
            raise ConfigError(f"http_port and grpc_port must differ; both are {self.http_port}")
        if self.is_autoscaled and self.admission == "optimistic":
            raise ConfigError(
                f"num_workers {self.num_workers} needs a gate, which measures the demand; use "
                "--admission predicted or reserve_max, or a fixed number of workers"
            )
        if self.min_ingress == 0:
            raise ConfigError(f"num_ingress must keep at least 1; got {self.num_ingress!r}")
        self._check_tls_files()
        self._check_origins()
        self._check_traces()
        is_embedded = isinstance(state_url.parse(self), state_url.EmbeddedAddress)
        if is_embedded and self.state_url and self.max_ingress > 1:
            raise ConfigError(
                f"state_url: one process can use a folder, and num_ingress is "
                f"{self.num_ingress!r}; use Redis (redis://HOST:PORT/DB), or one ingress"
            )

    def _check_tls_files(self) -> None:
        for given, other in (
            ("tls_cert_file", "tls_key_file"),
            ("tls_key_file", "tls_cert_file"),
            ("tls_client_ca_file", "tls_cert_file"),
        ):
            if getattr(self, given) is not None and getattr(self, other) is None:
                raise ConfigError(
                    f"{given} needs {other}: a certificate and its key switch TLS on together"
                )

    def _check_origins(self) -> None:
        for origin in self.origins:
            if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins: {origin!r} is no origin; write scheme://host or "
                    "scheme://host:port in lower case, as https://app.example.com, or *"
                )

    def _check_traces(self) -> None:
        if self.otlp_traces_endpoint is None:
            return
        try:
            url = urlsplit(self.otlp_traces_endpoint)
            has_address = url.scheme in ("http", "https") and url.hostname and url.port != 0
        except ValueError:  # of the port
            has_address = False
        if not has_address:
            raise ConfigError(
                f"otlp_traces_endpoint {self.otlp_traces_endpoint!r}: spans are sent by OTLP over "
                "HTTP; write http://HOST:4318, or https://HOST:PORT/PATH"
            )
        if url.username is not None or url.password is not None:
            raise ConfigError(
                "otlp_traces_endpoint: leave name and password out, which lists of processes "
                "would show; put a header into the environment variable "
                "OTEL_EXPORTER_OTLP_HEADERS, as Authorization=Basic%20..."
            )

    @property
    def otlp_traces_url(self) -> str | None:
        """`otlp_traces_endpoint` with its path; None: no traces are sent."""
        if self.otlp_traces_endpoint is None:
            return None
        url = urlsplit(self.otlp_traces_endpoint)
        return url.geturl() if url.path.strip("/") else url._replace(path="/v1/traces").geturl()

    @property
    def each_model(self) -> tuple[ServeConfig, ...]:
        """The configuration of each model: this one, where there is one model."""
        return self.models or (self,)

    @property
    def gate_scope(self) -> str:
        """Names the gate of the model, and what the gate keeps, in the cluster."""
        return f"{self.app_name}:{self.key}" if self.key else self.app_name

    @property
    def worker_deployment(self) -> str:
        """The name of the model's workers in Ray Serve."""
        return f"Worker-{self.key}" if self.key else "Worker"

    @property
    def origins(self) -> tuple[str, ...]:
        """`allowed_origins`, one by one."""
        given = (each.strip() for each in (self.allowed_origins or "").split(","))
        return tuple(each for each in given if each)

    @property
    def min_workers(self) -> int:
        """The fewest worker replicas; 0: none while there are no requests."""
        return _range(self.num_workers)[0]

    @property
    def max_workers(self) -> int:
        return _range(self.num_workers)[1]

    @property
    def is_autoscaled(self) -> bool:
        """Whether the number of workers follows the demand."""
        return isinstance(self.num_workers, str)

    @property
    def min_ingress(self) -> int:
        return _range(self.num_ingress)[0]

    @property
    def max_ingress(self) -> int:
        return _range(self.num_ingress)[1]

    @property
    def longest_possible_wait_s(self) -> float:
        """Seconds after which no request waits any more."""
        if self.wait_timeout_s is not None:
            return self.wait_timeout_s
        return WAIT_S if self.min_workers else WAIT_FROM_ZERO_S

    @property
    def has_tls(self) -> bool:
        """Whether clients connect by TLS."""
        return self.tls_cert_file is not None

    @property
    def http_url(self) -> str:
        """Of the HTTP API, without /v1."""
        return f"{'https' if self.has_tls else 'http'}://{self.address(self.http_port)}"

    @property
    def model_name(self) -> str:
        """The name of the model in answers, and the first by which clients address it."""
        names = [name for name in self._names if name != ANY_NAME]
        if names:
            return names[0]
        model = self.engine.model
        found = hub_name(model) if is_hub_id(model) else None
        own = model.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf")
        return own if found is None else found.short

    @property
    def other_names(self) -> tuple[str, ...]:
        """Further names of the model, each once; ANY_NAME among them stands for all."""
        return tuple(name for name in dict.fromkeys(self._names) if name != self.model_name)

    @property
    def _names(self) -> tuple[str, ...]:
        given = self.served_model_name
        return (given,) if isinstance(given, str) else given or ()

    @property
    def is_open(self) -> bool:
        """Whether other machines can use this server without a key."""
        return self.api_keys_file is None and self.host not in LOOPBACK

    def check_access(self) -> None:
        """Raise ConfigError if other machines, or web pages, could use this server without a key,
        unasked."""
        if ANY_ORIGIN in self.origins and self.api_keys_file is None and not self.insecure:
            raise ConfigError(
                "allowed_origins *: without API keys every web page in a browser that can reach it "
                "could use this server; name the origins, or write keys into a file and pass it as "
                "--api-keys-file (api_keys_file), or say --insecure (insecure: true)"
            )
        if self.is_open and not self.insecure:
            raise ConfigError(
                f"host {self.host}: without API keys every machine that can reach it could use "
                "this server; write keys into a file and pass it as --api-keys-file "
                "(api_keys_file), or say --insecure (insecure: true)"
            )

    def address(self, port: int) -> str:
        """host:port, as URLs and gRPC write it."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    def with_absolute_paths(self) -> ServeConfig:
        """The same configuration for processes with another working directory."""
        changes: dict[str, Any] = {}
        engine, folder = self.engine, Path(self.engine.model).expanduser()
        if engine.model not in NAMES and not is_hub_id(engine.model):
            engine = dataclasses.replace(engine, model=str(folder.resolve()))
        of_engine: dict[str, Any] = {}
        for name in ("chat_template", "download_dir", "packed_cache_dir"):
            if (path := getattr(engine, name)) is not None:
                of_engine[name] = str(Path(path).expanduser().resolve())
        engine = dataclasses.replace(engine, **of_engine)
        changes["engine"] = engine
        for name in _PATHS:
            path = getattr(self, name)
            if path is not None and (name, path) != ("predictor_file", AUTO_FILE):
                changes[name] = str(Path(path).expanduser().resolve())
        changes["models"] = tuple(each.with_absolute_paths() for each in self.models)
        return dataclasses.replace(self, **changes)


def _range(value: int | str) -> tuple[int, int]:
    """Minimum and maximum of N or "MIN:MAX", both checked."""
    if isinstance(value, int):
        return value, value
    low, high = value.split(":")
    return int(low), int(high)


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
    """A ServeConfig of flat settings, with a list of models, if there are several.

    Raises ConfigError naming the setting and the remedy.
    """
    if values.get(MODELS) is None:
        return _of_one({name: value for name, value in values.items() if name != MODELS})
    top, entries = split(values, [setting.name for setting in settings()])
    shared, models = _of_one(top), []
    for index, entry in enumerate(entries):
        with within(place(index)):
            made = _of_one(entry)
        models.append(dataclasses.replace(made, key=key_of(made.model_name)))
    if len(models) == 1:
        return dataclasses.replace(models[0], key="")
    return dataclasses.replace(shared, models=tuple(models))


def _of_one(values: Mapping[str, Any]) -> ServeConfig:
    known = {setting.name: setting for setting in settings()}
    of_engine = {setting.name for setting in settings_of(EngineConfig)}
    cluster: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known and isinstance(value, Mapping):
            raise ConfigError(
                f"{name}: settings have no sections; write those below it without {name}"
            )
        if name not in known:
            raise unknown_setting(name, known)
        (engine if name in of_engine else cluster)[name] = known[name].parse(value)
    return ServeConfig(engine=EngineConfig(**engine), **cluster)
