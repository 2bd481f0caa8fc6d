"""The command `hasten`: one thin file for each subcommand, named `<command>_cmd.py`.

Start with `main.py` (the table of commands). The commands are implemented in `tools/`, `launch/` and the other packages;
`flags.py` generates options from the settings' schema.
"""
