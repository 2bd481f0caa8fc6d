"""Metrics for operations: `part.py` reads a run, `catalogue.py` names the metrics, `server.py` serves them to Prometheus."""
