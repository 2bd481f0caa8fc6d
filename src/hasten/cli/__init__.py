"""The command `hasten`: one thin file for each subcommand, named `<command>_cmd.py`.

Start with `main.py` (the table of commands). The commands are implemented in `tools/`, `launch/` and the other packages;
`flags.py` makes an option for each setting of the schema and stores what was typed as an entry (`SettingAction`), which `config/resolve.py`
(`decode_all`) decodes and merges.
"""
