"""Fields of a body that are left out of it: which, and how client and operator learn of them.

Clients send more than any server knows, and more each month. With the setting `unknown_fields` at
`ignore`, what is not served is left out, named in a header of the answer, and logged once.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Literal

from penstock.deployments.ingress.http.asgi import Headers
from penstock.workers.request import RequestError

logger = logging.getLogger(__name__)

HEADER = "x-penstock-ignored-fields"
MAX_NAMED = 32  # fields in the header of one answer
MAX_NAME_CHARS = 64
MAX_LOGGED = 256  # fields that one process logs
_INDEX = re.compile(r"\[\d+\]")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")

UnknownFields = Literal["ignore", "refuse"]


class FieldPolicy:
    """What one ingress does with fields that it does not serve."""

    def __init__(self, unknown: UnknownFields = "refuse"):
        self.ignores_unknown = unknown == "ignore"
        self._logged: set[str] = set()

    def log(self, name: str) -> None:
        """Say once that a field is ignored."""
        if name in self._logged or len(self._logged) >= MAX_LOGGED:
            return
        self._logged.add(name)
        logger.warning("a client sends the field %s, which is ignored (said once)", name)


class IgnoredFields:
    """The fields of one body that are left out. Paths are like `messages[0].mood`."""

    def __init__(self, policy: FieldPolicy | None = None):
        """None: what is unknown is refused."""
        self._policy = policy or FieldPolicy()
        self._names: dict[str, None] = {}
        self._has_more = False

    @property
    def ignores_unknown(self) -> bool:
        """Whether what is not served is left out; else it is refused."""
        return self._policy.ignores_unknown

    @property
    def names(self) -> tuple[str, ...]:
        """Without the indexes of lists; the first MAX_NAMED of them."""
        return tuple(self._names)

    def add(self, path: str, value: Any = True) -> None:
        """`path` is left out. One that is null, false, zero or empty asks for nothing."""
        if not value or self._has_more:
            return
        name = _UNSAFE.sub("?", _INDEX.sub("", path[: 4 * MAX_NAME_CHARS]))[:MAX_NAME_CHARS]
        if name in self._names:
            return
        if len(self._names) >= MAX_NAMED:
            self._has_more = True
            return
        self._names[name] = None
        self._policy.log(name)

    def drop(
        self,
        path: str,
        message: str,
        *,
        value: Any = True,
        param: str | None = None,
        code: str = "unsupported_parameter",
    ) -> None:
        """`path` is left out if the policy allows it. Raises RequestError if it does not.

        `param`: the name of the field in the refusal; None: `path`.
        """
        if not self.ignores_unknown:
            raise RequestError(message, param=param or path, code=code)
        self.add(path, value)

    def headers(self) -> Headers:
        """The header that names them; none, where nothing was left out."""
        return [(name.encode(), value.encode()) for name, value in self.text_headers().items()]

    def text_headers(self) -> dict[str, str]:
        """The same as text."""
        more = ["and-more"] if self._has_more else []
        return {HEADER: ", ".join([*self._names, *more])} if self._names else {}
