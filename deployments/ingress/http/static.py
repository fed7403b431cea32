"""The files of the web console and of /docs: where each is served, and with which headers.

The console's files hold no data of any client, so they are served without an API key.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Response

FOLDER = Path(__file__).parent / "static"

_SCRIPT = "text/javascript; charset=utf-8"
# path: file in FOLDER, media type
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/console/console.css": ("console.css", "text/css; charset=utf-8"),
    "/console/console.js": ("console.js", _SCRIPT),
    "/console/api.js": ("api.js", _SCRIPT),
    "/console/chat.js": ("chat.js", _SCRIPT),
    "/console/live.js": ("live.js", _SCRIPT),
    "/console/lines.js": ("lines.js", _SCRIPT),
    "/console/batches.js": ("batches.js", _SCRIPT),
    "/console/sparkline.js": ("sparkline.js", _SCRIPT),
    "/console/icon.svg": ("icon.svg", "image/svg+xml"),
}
# Trusted types: no script here could turn a text into markup if it tried.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # the files of two versions do not fit each other
}
# /docs: one self-contained document (api.html), which fetches only /openapi.json and the API.
API_PAGE = FOLDER / "api.html"
API_PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
}


def add_console_routes(app: FastAPI) -> None:
    for path, (name, media_type) in FILES.items():
        _add_file(app, path, (FOLDER / name).read_bytes(), media_type)


def _add_file(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    async def file() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    app.get(path, include_in_schema=False)(file)
