"""vLLM's flags for machines, listeners and logs."""

from __future__ import annotations

from penstock.deployments.vllm_names.flag import VllmFlag, absent, alias, nothing, only, switch

_WHOLE_CONTEXTS = (
    "a context lies on one worker; --tensor-parallel-size and --pipeline-parallel-size divide the "
    "model, and --num-workers N serves N copies of it"
)
_RANKS_ON_NODES = (
    "Ray places the ranks: `penstock serve MODEL --ray-address HOST:PORT --tensor-parallel-size N "
    "--nodes-per-worker N` (docs/operations/cluster.md#a-model-over-several-devices)"
)
_RAY_PLACES = (
    "Ray places the workers on the machines of its cluster; start one with `ray start`, then "
    "`penstock serve MODEL --ray-address HOST:PORT --num-workers N` (docs/operations/cluster.md)"
)
_NO_EXPERT_GROUPS = (
    "each rank of a group has a fixed part of the experts, and every rank has all tokens; leave "
    "it out"
)
_CORS = "--allowed-origins is enough: GET, HEAD, POST, DELETE and any header pass, without cookies"

CLUSTER = (
    alias("-tp", setting="tensor_parallel_size"),
    alias("-pp", setting="pipeline_parallel_size"),
    only("--decode-context-parallel-size", "-dcp", values=("1",), sentence=_WHOLE_CONTEXTS),
    alias("--data-parallel-size", "-dp", setting="num_workers"),
    only("--data-parallel-backend", values=("ray",), sentence="Ray always starts the workers"),
    only(
        "--distributed-executor-backend",
        values=("ray", "mp", "uni"),
        sentence="Ray always starts the workers; leave it out",
    ),
    absent("--data-parallel-size-local", "-dpl", sentence=_RAY_PLACES),
    absent("--data-parallel-start-rank", "-dpr", sentence=_RAY_PLACES),
    absent("--data-parallel-address", "-dpa", sentence=_RAY_PLACES),
    absent("--data-parallel-rpc-port", "-dpp", sentence=_RAY_PLACES),
    absent("--data-parallel-hybrid-lb", "--data-parallel-external-lb", sentence=_RAY_PLACES),
    absent("--headless", sentence=_RAY_PLACES),
    absent("--nnodes", "--node-rank", "--master-addr", "--master-port", sentence=_RANKS_ON_NODES),
    switch("-ep", enable_expert_parallel=True),
    absent("--enable-eplb", "--enable-dbo", sentence=_NO_EXPERT_GROUPS),
    nothing("--disable-custom-all-reduce", because="the ranks of a group copy rows and never add"),
    alias("--api-server-count", "-asc", setting="num_ingress"),
    absent("--additional-config", sentence="Penstock has no plugins for platforms; leave it out"),
)

SERVER = (
    alias("--port", setting="http_port", sentence="gRPC has --grpc-port"),
    absent("--uds", sentence="Penstock listens on --host and --http-port, not on a Unix socket"),
    nothing("--grpc", because="gRPC is always there, on --grpc-port"),
    absent(
        "--api-key",
        sentence="other users can read command lines; `penstock keys add --file keys --tenant "
        "NAME` makes a key, and --api-keys-file keys accepts it",
    ),
    alias("--ssl-keyfile", setting="tls_key_file"),
    alias("--ssl-certfile", setting="tls_cert_file"),
    alias(
        "--ssl-ca-certs",
        setting="tls_client_ca_file",
        sentence="clients must then show a certificate",
    ),
    only(
        "--ssl-cert-reqs",
        values=("2",),
        sentence="with --ssl-ca-certs clients must show a certificate, without it they need none; "
        "leave it out",
    ),
    absent("--ssl-ciphers", sentence="the ciphers cannot be chosen; leave it out"),
    nothing("--enable-ssl-refresh", because="a new certificate is always taken, within 10 s"),
    absent("--root-path", sentence="let the proxy in front remove the path"),
    absent("--allowed-methods", sentence=_CORS),
    absent("--allowed-headers", "--allow-credentials", sentence=_CORS),
    absent("--disable-fastapi-docs", sentence="a proxy in front can refuse /docs; leave it out"),
    nothing("--enable-request-id-headers", because="all answers have x-request-id"),
    nothing("--enable-prompt-tokens-details", because="usage always has cached_tokens"),
    absent(
        "--enable-force-include-usage", sentence="clients ask with stream_options.include_usage"
    ),
    absent("--return-tokens-as-token-ids", sentence="clients ask with return_token_ids"),
    absent(
        "--enable-server-load-tracking",
        sentence="GET /v1/penstock/status, and the metrics, say how busy the server is",
    ),
)

LOGS = (
    nothing(
        *("--disable-log-requests", "--no-enable-log-requests"),
        because="no prompt is ever logged; each request has one line without text, which "
        "--log-level warning leaves out",
    ),
    absent(
        *("--enable-log-requests", "--max-log-len"),
        sentence="no prompt is ever logged; each request has one line without text",
    ),
    nothing("--disable-uvicorn-access-log", because="there is no access log"),
    VllmFlag(
        ("--uvicorn-log-level",),
        "--log-level takes debug, info, warning or error",
        values={
            **{level: {"log_level": level} for level in ("debug", "info", "warning", "error")},
            "trace": {"log_level": "debug"},
            "critical": {"log_level": "error"},
        },
    ),
    absent("--disable-log-stats", sentence="a line about throughput is printed under load only"),
    absent(
        "--collect-detailed-traces",
        sentence="with --otlp-traces-endpoint a trace always has queue, prefill and decode",
    ),
)
