"""File formats of a checkpoint: manifest, safetensors and torch files, checksums.

Start with `manifest.py` (the table of contents of a checkpoint) and `formats.py` (reading and writing both tensor formats).
`packing.py` turns nested state into JSON plus tensors.
"""
