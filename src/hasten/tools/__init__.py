"""Implementation of subcommands of `hasten`; imported only by `cli`.

`wizard.py` asks the questions of `hasten config`; `machine.py` describes the current machine for it and for `hasten env`; `matrix.py` runs the
self-check under several settings.
"""
