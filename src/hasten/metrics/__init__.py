"""Metrics for operations: Prometheus text over HTTP. Start with `catalogue.py` (names), then `server.py`; `scrape.py` reads other ranks."""
