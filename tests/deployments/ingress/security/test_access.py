"""Every route and every method, as the servers themselves list them, with every kind of key."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
from fastapi import FastAPI
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from starlette.routing import Route

from penstock.deployments.ingress.http.app import build_app
from penstock.deployments.security import roles
from penstock.deployments.security.api_keys import ApiKeys
from penstock.deployments.security.key_format import new_key
from penstock.deployments.security.roles import ROUTES, RPCS, Access, Need, Role, need_of_route
from penstock.workers.request import FinishReason
from tests.deployments.security.keys import bearer, key_of
from tests.deployments.serving import ScriptedBackend, Serving, core_over

Code = grpc.StatusCode
TEXTS: dict[str, str] = {}


def _keys() -> ApiKeys:
    """One key for each role, one without it, and two that are not valid now."""
    records = []
    for role in Role:
        TEXTS[role], record = key_of(roles=[role])
        records.append(record)
        others = set(Role) - {role, Role.ADMIN}
        TEXTS[f"not {role}"], record = key_of(roles=others)
        records.append(record)
    TEXTS["expired"], expired = key_of(roles=Role, expires=1.0)
    TEXTS["early"], early = key_of(roles=Role, not_before=time.time() + 1e6)
    return ApiKeys([*records, expired, early])


KEYS = _keys()


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    backend = ScriptedBackend([5], FinishReason.STOP)
    with Serving(backend, api_keys=KEYS, metrics=lambda: b"") as running:
        yield running


def routes_of(app: FastAPI) -> list[tuple[str, str]]:
    return sorted(
        (method, route.path)
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
    )


ALL_ROUTES = routes_of(build_app(core_over(ScriptedBackend()), metrics=lambda: b""))


def test_the_table_has_the_routes_of_the_app_and_no_others() -> None:
    assert sorted(ROUTES) == ALL_ROUTES


@pytest.mark.parametrize(("method", "path"), ALL_ROUTES)
def test_route(serving: Serving, method: str, path: str) -> None:
    need = ROUTES[method, path]
    url = serving.base_url + path.replace("{model:path}", "x/y").replace("{", "").replace("}", "")

    def answer(key: str | None) -> tuple[int, str]:
        headers = {} if key is None else bearer(key)
        content: dict[str, Any] = {"json": {}} if method == "POST" else {}
        got = httpx.request(method, url, headers=headers, timeout=30, **content)
        is_error = got.status_code in (401, 403) and not path.startswith("/v1/messages")
        return got.status_code, got.json()["error"]["code"] if is_error else ""

    is_public = need is Access.PUBLIC
    for key, status, code in (
        (None, 401, "invalid_api_key"),
        (new_key().text, 401, "invalid_api_key"),
        (TEXTS["expired"], 401, "api_key_expired"),
        (TEXTS["early"], 401, "api_key_not_yet_valid"),
    ):
        got = answer(key)
        if is_public:
            assert got[0] not in (401, 403)
        else:
            assert got[0] == status and got[1] in (code, ""), (key, got)
    if isinstance(need, Role):
        got = answer(TEXTS[f"not {need}"])
        assert got[0] == 403 and got[1] in ("permission_denied", "")
        allowed = [need, Role.ADMIN]
    else:
        allowed = list(Role)
    for role in allowed:
        assert answer(TEXTS[role])[0] not in (401, 403), role


def test_the_error_says_which_role_is_missing(serving: Serving) -> None:
    answer = httpx.get(
        f"{serving.base_url}/v1/penstock/queue", headers=bearer(TEXTS[Role.INFER]), timeout=30
    )
    error = answer.json()["error"]
    assert error["message"] == "GET /v1/penstock/queue needs a key with the role queue"
    assert error["type"] == "permission_error" and "www-authenticate" not in answer.headers


def test_a_route_without_an_entry_asks_for_admin(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(roles.ROUTES, ("GET", "/version"))
    assert need_of_route("GET", "/version") is None
    for role in Role:
        answer = httpx.get(f"{serving.base_url}/version", headers=bearer(TEXTS[role]), timeout=30)
        assert answer.status_code == (200 if role is Role.ADMIN else 403)
    # The router takes this for /live, and no table does.
    for path in ("/live%0A", "/v1/models%0A"):
        answer = httpx.get(serving.base_url + path, headers=bearer(TEXTS["infer"]), timeout=30)
        assert answer.status_code in (403, 404)
        assert httpx.get(serving.base_url + path, timeout=30).status_code == 401


def test_what_does_not_exist_is_404_or_405_for_any_valid_key(serving: Serving) -> None:
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("PUT", "/health", 405),
    ):
        url = serving.base_url + path
        answer = httpx.request(method, url, headers=bearer(TEXTS[Role.METRICS]), timeout=30)
        assert answer.status_code == status, path
    assert httpx.put(f"{serving.base_url}/health", timeout=30).status_code == 405
    assert httpx.get(f"{serving.base_url}/nowhere", timeout=30).status_code == 401


# gRPC


@dataclass(frozen=True)
class WithKey(
    grpc.UnaryUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Sends a key with each call."""

    key: str

    def _call(self, go_on: Any, details: Any, request: Any) -> Any:
        named = (("authorization", f"Bearer {self.key}"),)
        return go_on(details._replace(metadata=named), request)

    intercept_unary_unary = intercept_stream_stream = _call


def methods_of(serving: Serving) -> set[str]:
    """All methods that the server's reflection lists."""
    with grpc.insecure_channel(serving.grpc_target) as channel:
        with_key = grpc.intercept_channel(channel, WithKey(TEXTS[Role.METRICS]))
        database = ProtoReflectionDescriptorDatabase(with_key)
        found = set()
        for name in database.get_services():
            (service,) = (
                each
                for each in database.FindFileContainingSymbol(name).service
                if name.endswith(f".{each.name}")
            )
            found |= {f"/{name}/{method.name}" for method in service.method}
        return found


def test_every_method_with_every_kind_of_key(serving: Serving) -> None:
    methods = methods_of(serving)
    assert methods == set(RPCS)
    with grpc.insecure_channel(serving.grpc_target) as channel:

        def status(method: str, key: str | None) -> tuple[grpc.StatusCode, str]:
            metadata = () if key is None else (("authorization", f"Bearer {key}"),)
            call = channel.stream_stream(method, lambda data: data, lambda data: data)(
                iter([b""]), metadata=metadata, timeout=30
            )
            try:
                next(call)
            except grpc.RpcError as error:
                trailing = dict(error.trailing_metadata() or ())
                return error.code(), trailing.get("error-code", "")
            except StopIteration:
                return Code.OK, ""
            finally:
                call.cancel()
            return Code.OK, ""

        refused = (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED)
        for method, need in RPCS.items():
            for key, code in (
                (None, "invalid_api_key"),
                (new_key().text, "invalid_api_key"),
                (TEXTS["expired"], "api_key_expired"),
                (TEXTS["early"], "api_key_not_yet_valid"),
            ):
                got = status(method, key)
                if need is Access.PUBLIC:
                    assert got[0] not in refused, method
                else:
                    assert got == (Code.UNAUTHENTICATED, code), method
            allowed: list[Role] = list(Role)
            if isinstance(need, Role):
                got = status(method, TEXTS[f"not {need}"])
                assert got == (Code.PERMISSION_DENIED, "permission_denied"), method
                allowed = [need, Role.ADMIN]
            for role in allowed:
                assert status(method, TEXTS[role])[0] not in refused, (method, role)


def test_a_method_without_an_entry_asks_for_admin(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = "/penstock.v1.InferenceService/ListModels"
    monkeypatch.delitem(roles.RPCS, method)
    with grpc.insecure_channel(serving.grpc_target) as channel:
        for role, of_method, code in (
            (Role.INFER, method, Code.PERMISSION_DENIED),
            (Role.ADMIN, method, Code.OK),
            (Role.INFER, "/penstock.v1.InferenceService/Nothing", Code.UNIMPLEMENTED),
        ):
            call = channel.unary_unary(of_method, lambda data: data, lambda data: data)
            metadata = (("authorization", f"Bearer {TEXTS[role]}"),)
            try:
                call(b"", metadata=metadata, timeout=10)
                got = Code.OK
            except grpc.RpcError as error:
                got = error.code()
            assert got is code, (role, of_method)


def need_of(text: str) -> Need:
    return Role(text) if text in set(Role) else Access(text)


def test_the_tables_hold_roles_and_nothing_else() -> None:
    assert all(need_of(str(need)) is need for need in (*ROUTES.values(), *RPCS.values()))
