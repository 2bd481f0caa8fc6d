"""Sequence packing: `packing.py` fills rows with samples of different lengths, and makes the masks that keep them apart."""
