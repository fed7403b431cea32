"""`penstock explain` against a server that runs, and where several ingresses share an address."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx

from penstock.deployments.cli import main as cli
from tests.deployments.serving import EngineBackend, Serving


def test_a_request_of_a_live_server(capsys):
    backend = EngineBackend()
    try:
        with Serving(backend) as servers:
            body = {"model": "builtin", "prompt": "The sea", "max_tokens": 5, "temperature": 0}
            answer = httpx.post(f"{servers.base_url}/v1/completions", json=body, timeout=60)
            for name in (answer.headers["x-request-id"], answer.json()["id"]):
                assert cli.main(["explain", "--url", servers.base_url, name]) == 0
                out = capsys.readouterr().out
                assert out.startswith(f"request {answer.headers['x-request-id']} of builtin")
                assert "first token" in out and "answer tokens" in out
            assert cli.main(["explain", "--url", servers.base_url, "nothing"]) == 1
    finally:
        backend.stop()
    assert "no request 'nothing' here" in capsys.readouterr().err


class _Ingresses(BaseHTTPRequestHandler):
    """Two behind one address, in turn; the second knows the request."""

    protocol_version = "HTTP/1.0"
    num_asked = 0

    def do_GET(self):
        code = 200
        body: dict[str, Any] = {"ingresses": [{}, {}]}
        if "/requests/" in self.path:
            _Ingresses.num_asked += 1
            code, body = 404, {"error": {"message": "no request here", "code": "not_found"}}
            if _Ingresses.num_asked == 2:
                code, body = 200, {"answers": []}
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args):
        pass


def test_another_ingress_is_asked_over_a_new_connection(capsys):
    server = HTTPServer(("127.0.0.1", 0), _Ingresses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        assert cli.main(["explain", "--url", url, "x"]) == 0
        assert _Ingresses.num_asked == 2
        _Ingresses.num_asked = 2  # now none knows it
        assert cli.main(["explain", "--url", url, "x"]) == 1
        assert _Ingresses.num_asked == 2 + 8
    finally:
        server.shutdown()
        server.server_close()
    assert "no request here" in capsys.readouterr().err
