"""Extension: metrics for operations, served for Prometheus."""
