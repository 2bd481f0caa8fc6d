"""`hasten top`: `command.py` shows the ranks of a job on this machine, and asks the `status_server.py` of each over its socket."""
