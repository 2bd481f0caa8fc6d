"""Settings: frozen, typed, decoded strictly from files, flags, variables and code, each value with its source.

Start with `root.py` (all sections) and `base.py` (fields); `resolve.py` makes entries from files, variables and
code, `cli/flags.py` from flags, and decodes and merges them; `decode.py` checks single values, `checks.py` their combinations.
`established.py` and `legacy.py` read the names and files of Hugging Face Accelerate.
"""
