"""Checkpoints on local disks and object stores: atomic, verified, free of pickle, loadable at any world size.

Start with `save.py` (one save, from the draft to the commit) and `reader.py` (opening and verifying), then `writer.py` (layout of files), `state_dicts.py` (models and optimizers),
`reshard.py` (tensor slices from any layout) and `ownership.py` (which rank writes which slice).
`store/` holds the storage backends, `format/` the file formats, `export.py` reads and writes models in the Hub layout.
"""
