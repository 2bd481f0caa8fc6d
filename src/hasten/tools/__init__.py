"""Implementation of the subcommands of `hasten`, one folder or file each; imported only by `cli`.

Start with the command's file in `cli/`, which names the module here. `wizard.py` asks the questions of `hasten config`; `machine.py`
describes the current machine for it, for `hasten env` and for `hasten launch --auto`.
"""
