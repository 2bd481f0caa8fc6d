"""Metrics for operations: Prometheus text over HTTP, and OTLP. Start with `catalogue.py` (names), then `server.py` and `otlp.py`."""
