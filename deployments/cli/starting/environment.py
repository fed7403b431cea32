"""The environment variables of Ray, which its library reads when it is imported."""

from __future__ import annotations

import os
import secrets

from penstock.deployments.config import ServeConfig
from penstock.deployments.supervision.ray_workarounds import driver_environment
from penstock.workers.errors import ConfigError


def prepare_environment(config: ServeConfig) -> None:
    """Set Ray's environment variables, unless the user has set them. Raises ConfigError."""
    for name, value in driver_environment().items():
        os.environ.setdefault(name, value)
    if config.ray_address is None and "RAY_AUTH_MODE" not in os.environ:
        # Ray's ports are open on every interface: the token admits only our own processes.
        os.environ["RAY_AUTH_MODE"] = "token"
        if not os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    is_off = os.environ.get("RAY_AUTH_MODE", "").strip().lower() == "disabled"
    if config.ray_address is None and is_off and not config.insecure:
        raise ConfigError(
            "RAY_AUTH_MODE is 'disabled' in the environment: everyone who reaches Ray's ports "
            "could run code on this machine; unset it or set it to token, or say --insecure "
            "(insecure: true)"
        )
