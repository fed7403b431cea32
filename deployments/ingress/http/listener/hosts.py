"""Which names a server without API keys answers to, so that web pages cannot reach it by theirs.

A page may have its own name resolve to 127.0.0.1 (DNS rebinding); the browser then lets it read the
answers, since they seem to come from the page's server. The `Host` header gives it away.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from penstock.deployments.ingress.http.asgi import Scope, header
from penstock.workers.request import RequestError

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


class AllowedHosts:
    """The names under which requests are answered; those of this machine's loopback are.

    `origins`: of pages that may use this server from elsewhere, whatever their names; "*": all.
    """

    def __init__(self, names: Iterable[str] = (), origins: Iterable[str] = ()):
        self._names = frozenset(name.lower() for name in (*LOCAL_NAMES, *names))
        self._origins = frozenset(origins)

    def check(self, scope: Scope) -> None:
        """Raise RequestError host_not_allowed unless `Host` and `Origin` have an allowed name."""
        host = header(scope, b"host")
        if host is not None and _name_in(f"//{host}") not in self._names:
            raise _refusal("Host", host, self._names)
        origin = header(scope, b"origin")
        if origin is None or not self._origins.isdisjoint((origin, "*")):
            return
        if _name_in(origin) not in self._names:
            raise _refusal("Origin", origin, self._names)


def _name_in(url: str) -> str | None:
    """The host name in a URL, in lower case; None: it has none."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _refusal(name: str, value: str, allowed: Collection[str]) -> RequestError:
    return RequestError(
        f"{name} {value[:100]!a} is not one of {', '.join(sorted(allowed))}; a server without "
        "API keys answers to these only: add it to allowed_hosts (--allowed-hosts), or use API "
        "keys",
        code="host_not_allowed",
    )
