"""Traces of requests, sent to a receiver of OpenTelemetry's (OTLP over HTTP).

listeners.py opens a tracer where the setting otlp_traces_endpoint has an address. Begin with
`opening.open_tracer`; only tracer.py and exporter.py import OpenTelemetry, an optional dependency.
"""
