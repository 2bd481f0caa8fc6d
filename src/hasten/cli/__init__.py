"""The command `hasten`: one thin file for each subcommand, named `<command>_cmd.py`.

Start with `main.py` (the table of commands). What a command does lies in `tools/`, `launch/` or the room it shows;
`flags.py` makes options from the settings' schema.
"""
