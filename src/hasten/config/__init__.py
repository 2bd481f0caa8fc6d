"""Settings: frozen, typed, decoded strictly from files, flags, variables and code, each value with its source.

Start with `root.py` (all sections) and `base.py` (fields); `layers.py` and `resolve.py` merge the sources, `decode.py` checks values.
`established.py` and `legacy.py` read the names and files of Hugging Face Accelerate.
"""
