"""Whether spans can be sent, and the tracer that sends them. Loads OpenTelemetry only for that."""

from __future__ import annotations

import importlib.util
import logging
from urllib.parse import urlsplit

from penstock.deployments.config import ServeConfig
from penstock.deployments.ingress.core.tracing import Tracer
from penstock.workers.errors import ConfigError

log = logging.getLogger("penstock.traces")

_NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")


def check_installed() -> None:
    """Raise ConfigError unless the packages that send spans are installed."""
    if not all(map(_is_installed, _NEEDED)):
        raise ConfigError(
            "otlp_traces_endpoint needs the OpenTelemetry SDK and its OTLP exporter, which are not "
            "installed here: pip install 'penstock[otel]'"
        )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False


def open_tracer(config: ServeConfig, instance: str) -> Tracer | None:
    """The tracer of an ingress; None: no traces are configured. Raises ConfigError.

    `instance`: names this ingress, as the resource's service.instance.id.
    """
    url = config.otlp_traces_url
    if url is None:
        return None
    check_installed()
    from penstock.deployments.ingress.tracing.exporter import is_disabled, provider_for
    from penstock.deployments.ingress.tracing.tracer import SpanTracer

    if is_disabled():
        log.warning("OTEL_SDK_DISABLED is true: no traces are sent, whatever the settings say")
        return None
    try:
        provider, exporter = provider_for(url, config.otlp_traces_sample_ratio, instance)
    except ValueError as error:  # of an environment variable
        raise ConfigError(
            f"otlp_traces_endpoint: the OTEL_ variables of the environment are not valid: {error}"
        ) from None
    log.info("the spans of requests are sent to %s", urlsplit(url)._replace(query="").geturl())
    return SpanTracer(provider, give_up=exporter.shutdown)
