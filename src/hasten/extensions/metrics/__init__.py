"""Metrics for operations: `part.py` reads a run and serves it to Prometheus, `catalogue.py` names the metrics."""
