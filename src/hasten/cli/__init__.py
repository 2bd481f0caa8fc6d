"""The command `hasten`: one thin file for each subcommand, named `<command>_cmd.py`.

Start with `main.py` (the table of commands). The commands are implemented in `tools/`, `launch/` and the other packages;
`flags.py` makes an option for each setting of the schema and stores what was typed as an entry (`SettingAction`), which `launch/job.py`
(`prepare`) passes to `config/resolve.py` (`resolve`: decode, merge, build).
"""
