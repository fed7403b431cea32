"""The settings of traces, the optional packages, and that nothing is loaded without them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.deployments.config import ServeConfig, config_from
from penstock.deployments.ingress.tracing.opening import open_tracer
from penstock.deployments.preflight import check_before_start
from penstock.workers.errors import ConfigError
from tests.deployments.ports import free_port

REMEDY = "pip install 'penstock[otel]'"


def python(source: str) -> str:
    """What a new process prints."""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("given", "url"),
    [
        (None, None),
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://[::1]:4318", "https://[::1]:4318/v1/traces"),
        ("https://far/otlp/v1/traces?team=a", "https://far/otlp/v1/traces?team=a"),
    ],
)
def test_the_address(given, url):
    assert ServeConfig(otlp_traces_endpoint=given).otlp_traces_url == url


@pytest.mark.parametrize(
    "given", ["collector:4318", "grpc://collector:4317", "http://", "http://a:b", "http://a:0", ""]
)
def test_an_address_that_cannot_be_is_refused_with_the_remedy(given):
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint.*write http://HOST:4318"):
        ServeConfig(otlp_traces_endpoint=given)


def test_a_secret_in_the_address_is_refused_and_not_repeated():
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as raised:
        ServeConfig(otlp_traces_endpoint="https://me:s3cret@far/v1/traces")
    assert "s3cret" not in str(raised.value)


def test_the_part_that_is_sampled_has_bounds():
    assert config_from({"otlp_traces_sample_ratio": "0.1"}).otlp_traces_sample_ratio == 0.1
    with pytest.raises(ConfigError, match=r"otlp_traces_sample_ratio must lie in 0 \.\.\. 1"):
        ServeConfig(otlp_traces_sample_ratio=1.5)


def test_without_the_setting_nothing_that_makes_or_sends_spans_is_loaded():
    """FastAPI and Redis's client load OpenTelemetry's API for themselves, where it is installed;
    Ray's own processes load more."""
    source = (
        "import sys\n"
        "import penstock.deployments.ingress.listeners\n"
        "import penstock.deployments.preflight\n"
        "from penstock.deployments.config import ServeConfig\n"
        "from penstock.deployments.ingress.tracing.opening import open_tracer\n"
        "assert open_tracer(ServeConfig(), 'i') is None\n"
        "for name in sorted(sys.modules):\n"
        "    if name.startswith(('opentelemetry.sdk.trace', 'opentelemetry.exporter',\n"
        "            'penstock.deployments.ingress.tracing')):\n"
        "        print(name)"
    )
    package = "penstock.deployments.ingress.tracing"
    assert python(source).split("\n") == [package, f"{package}.opening"]


@pytest.mark.parametrize(
    "missing", ["opentelemetry.exporter", "opentelemetry.sdk", "opentelemetry"]
)
def test_without_the_packages_the_start_fails_with_the_remedy(missing):
    """In the preflight check, and in an ingress on another machine."""
    source = (
        "import sys\n"
        f"sys.modules[{missing!r}] = None  # as if it were not installed\n"
        "from penstock.deployments.config import ServeConfig\n"
        "from penstock.deployments.ingress.tracing.opening import open_tracer\n"
        "from penstock.deployments.preflight import check_before_start\n"
        "from penstock.workers.errors import ConfigError\n"
        f"config = ServeConfig(otlp_traces_endpoint='http://a:4318', http_port={free_port()},\n"
        f"    grpc_port={free_port()})\n"
        "for check in (lambda: open_tracer(config, 'i'), lambda: check_before_start(config)):\n"
        "    try:\n"
        "        check()\n"
        "    except ConfigError as error:\n"
        "        print(error)"
    )
    lines = python(source).split("\n")
    assert len(lines) == 2
    assert all("otlp_traces_endpoint" in line and REMEDY in line for line in lines)


def test_with_the_packages_the_preflight_check_passes():
    check_before_start(
        ServeConfig(
            otlp_traces_endpoint="http://nobody.invalid:4318",
            http_port=free_port(),
            grpc_port=free_port(),
        )
    )


def test_the_environment_may_switch_opentelemetry_off(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert open_tracer(ServeConfig(otlp_traces_endpoint="http://a:4318"), "i") is None
    assert "OTEL_SDK_DISABLED" in caplog.text


def test_a_variable_of_the_environment_that_is_not_valid_is_an_error(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")  # below that of a batch
    with pytest.raises(ConfigError, match=r"OTEL_ variables of the environment.*max_queue_size"):
        open_tracer(ServeConfig(otlp_traces_endpoint="http://a:4318"), "i")
