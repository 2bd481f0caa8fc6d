"""Files in the launcher's folder, by which the launchers and the ranks of all replicas tell each other of the run."""

from __future__ import annotations

from typing import Final

FINISHED_FILE: Final = "finished"
"""Present once a replica has ended the run with success."""
AGREED_FILE: Final = "agreed"
"""The update and the history on which the replicas have agreed last."""
JOINED_PREFIX: Final = "joined-"
"""Start of the names of files, one for each live replica that has joined the run and holds its state."""
STOPPING_FILE: Final = "stopping"
"""Present once the whole run was told to stop, not one replica alone."""
