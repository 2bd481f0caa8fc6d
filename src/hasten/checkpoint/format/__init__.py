"""The files of a checkpoint: manifest, safetensors and torch files, checksums.

Start with `manifest.py` (what a checkpoint says of itself) and `formats.py` (reading and writing tensors of either kind).
`layout.py` and `packing.py` decide which tensor goes into which file.
"""
