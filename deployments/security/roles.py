"""Which role a route or a method asks for: two tables, and nothing else decides.

Deny by default: what is not in a table asks for the role admin. docs/reference/access.md is made
from these tables, and a test takes every route and every method from the servers themselves.
"""

from __future__ import annotations

import re
from enum import StrEnum


class Role(StrEnum):
    """What a key may do. `ADMIN` has all the others."""

    INFER = "infer"  # ask the model, and everything about own requests, files and batches
    METRICS = "metrics"  # see how the cluster is
    QUEUE = "queue"  # see own waiting requests; with admin, those of all tenants
    ADMIN = "admin"


class Access(StrEnum):
    """What a route asks for where it asks for no role."""

    PUBLIC = "public"  # no key
    ANY_KEY = "any key"  # a valid key, whatever its roles


Need = Role | Access
ALL_ROLES = frozenset(Role)
BARE_KEY_ROLES = frozenset({Role.INFER, Role.METRICS, Role.QUEUE})

_INFER, _PUBLIC, _ANY = Role.INFER, Access.PUBLIC, Access.ANY_KEY

# By method and path, as the app writes its paths.
ROUTES: dict[tuple[str, str], Need] = {
    ("GET", "/health"): _PUBLIC,
    ("GET", "/live"): _PUBLIC,
    ("GET", "/ready"): _PUBLIC,
    ("GET", "/"): _PUBLIC,  # the console's files hold no data of any client
    ("GET", "/console/console.css"): _PUBLIC,
    ("GET", "/console/console.js"): _PUBLIC,
    ("GET", "/console/api.js"): _PUBLIC,
    ("GET", "/console/chat.js"): _PUBLIC,
    ("GET", "/console/live.js"): _PUBLIC,
    ("GET", "/console/lines.js"): _PUBLIC,
    ("GET", "/console/batches.js"): _PUBLIC,
    ("GET", "/console/sparkline.js"): _PUBLIC,
    ("GET", "/console/icon.svg"): _PUBLIC,
    ("GET", "/ping"): _PUBLIC,
    ("GET", "/version"): _ANY,
    ("GET", "/docs"): _ANY,
    ("GET", "/openapi.json"): _ANY,
    ("GET", "/v1/models"): _ANY,
    ("GET", "/v1/models/{model:path}"): _ANY,
    ("POST", "/v1/chat/completions"): _INFER,
    ("POST", "/v1/completions"): _INFER,
    ("POST", "/v1/messages"): _INFER,
    ("POST", "/v1/messages/count_tokens"): _INFER,
    ("POST", "/v1/responses"): _INFER,
    ("POST", "/v1/responses/input_tokens"): _INFER,
    ("GET", "/v1/responses/{response_id}"): _INFER,
    ("DELETE", "/v1/responses/{response_id}"): _INFER,
    ("GET", "/v1/responses/{response_id}/input_items"): _INFER,
    ("POST", "/v1/responses/{response_id}/cancel"): _INFER,
    ("POST", "/v1/embeddings"): _INFER,
    ("POST", "/v1/score"): _INFER,
    ("POST", "/v1/rerank"): _INFER,
    ("POST", "/tokenize"): _INFER,
    ("POST", "/detokenize"): _INFER,
    ("GET", "/tokenizer_info"): _INFER,
    ("GET", "/v1/penstock/streams/{request_id}"): _INFER,
    ("GET", "/v1/penstock/requests/{request_id}"): _INFER,
    ("POST", "/v1/files"): _INFER,
    ("GET", "/v1/files"): _INFER,
    ("GET", "/v1/files/{file_id}"): _INFER,
    ("GET", "/v1/files/{file_id}/content"): _INFER,
    ("DELETE", "/v1/files/{file_id}"): _INFER,
    ("POST", "/v1/batches"): _INFER,
    ("GET", "/v1/batches"): _INFER,
    ("GET", "/v1/batches/{batch_id}"): _INFER,
    ("POST", "/v1/batches/{batch_id}/cancel"): _INFER,
    ("POST", "/v1/penstock/jobs"): _INFER,
    ("GET", "/v1/penstock/status"): Role.METRICS,
    ("GET", "/metrics"): Role.METRICS,
    ("GET", "/load"): Role.METRICS,
    ("GET", "/v1/penstock/queue"): Role.QUEUE,
    ("POST", "/v1/penstock/experts/reload"): Role.ADMIN,
    ("POST", "/v1/load_lora_adapter"): Role.ADMIN,
    ("POST", "/v1/unload_lora_adapter"): Role.ADMIN,
}

# By full name of the method.
RPCS: dict[str, Need] = {
    "/grpc.health.v1.Health/Check": _PUBLIC,
    "/grpc.health.v1.Health/List": _PUBLIC,
    "/grpc.health.v1.Health/Watch": _PUBLIC,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ANY,
    "/penstock.v1.InferenceService/Generate": _INFER,
    "/penstock.v1.InferenceService/Chat": _INFER,
    "/penstock.v1.InferenceService/ResumeGenerate": _INFER,
    "/penstock.v1.InferenceService/ResumeChat": _INFER,
    "/penstock.v1.InferenceService/Embed": _INFER,
    "/penstock.v1.InferenceService/Tokenize": _INFER,
    "/penstock.v1.InferenceService/Detokenize": _INFER,
    "/penstock.v1.InferenceService/Cancel": _INFER,
    "/penstock.v1.InferenceService/ListModels": _ANY,
    "/inference.GRPCInferenceService/ServerLive": _ANY,
    "/inference.GRPCInferenceService/ServerReady": _ANY,
    "/inference.GRPCInferenceService/ModelReady": _ANY,
    "/inference.GRPCInferenceService/ServerMetadata": _ANY,
    "/inference.GRPCInferenceService/ModelMetadata": _ANY,
    "/inference.GRPCInferenceService/ModelInfer": _INFER,
}

PUBLIC_PATHS = frozenset(path for (_, path), need in ROUTES.items() if need is Access.PUBLIC)


def _pattern(path: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)(:path)?\}", path)  # text, name, kind, text, ...
    texts, kinds = parts[::3], parts[2::3]
    groups = [".*" if kind else "[^/]+" for kind in kinds]
    return re.compile(
        "".join(f"{re.escape(text)}{group}" for text, group in zip(texts, [*groups, ""])),
        re.DOTALL,
    )


_PATTERNS = [
    (method, _pattern(path), need) for (method, path), need in ROUTES.items() if "{" in path
]


def need_of_route(method: str, path: str) -> Need | None:
    """What a request asks for, by the path as it came; None: the table does not know it."""
    need = ROUTES.get((method, path))
    if need is not None:
        return need
    for known, pattern, of_pattern in _PATTERNS:
        if known == method and pattern.fullmatch(path):
            return of_pattern
    return None
