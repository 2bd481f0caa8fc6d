"""Weights in four or eight bits for inference and adapters. Start with `quantize.py`."""
