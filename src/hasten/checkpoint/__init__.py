"""Checkpoints on disks and in buckets: complete or invisible, verified, free of pickle, readable at any world size.

Start with `writer.py` (a collective save) and `reader.py` (opening and verifying), then `reshard.py` (slices of a tensor from any layout).
`store/` is where files lie and become visible, `format/` what is in them, `export.py` models as the Hub lays them out.
"""
