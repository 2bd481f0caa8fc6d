"""Capture the screens of this folder: real commands in a real terminal (tmux), saved as text and SVG.

Run `python docs/screens/capture.py` from the root of the repository; tmux must be installed.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
HASTEN = f"{shlex.quote(sys.executable)} -m hasten.cli.main"
FILE = "schema: 1\nmixed_precision: fp16\nfsdp:\n  cpu_offload: true\nlaunch:\n  num_processes: 2\n"


@dataclass
class Screen:
    """A terminal of its own, with a prompt and a home without settings."""

    folder: str
    name: str = "hasten-screens"
    width: int = 110
    height: int = 34
    keys: list[str] = field(default_factory=list)

    def __enter__(self) -> Screen:
        env = f"env -i PATH=/usr/bin:/bin TERM=xterm-256color HOME={self.folder} HASTEN_HOME={self.folder} PS1='$ '"
        self.tmux(
            "new-session",
            "-d",
            "-x",
            str(self.width),
            "-y",
            str(self.height),
            f"{env} bash --norc --noprofile",
        )
        self.tmux(
            "send-keys",
            f'cd {self.folder}; hasten() {{ {HASTEN} "$@"; }}; clear',
            "Enter",
        )
        time.sleep(1)
        return self

    def __exit__(self, *error: object) -> None:
        self.tmux("kill-session")

    def tmux(self, command: str, *arguments: str) -> str:
        """Run one tmux command on this session and return what it prints."""
        target = ["-s", self.name] if command == "new-session" else ["-t", self.name]
        done = subprocess.run(
            ["tmux", command, *target, *arguments],
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout

    def press(self, *keys: str, until: str, seconds: float = 30) -> None:
        """Press keys (tmux's names, or text) and wait until the screen shows a text."""
        for key in keys:
            self.tmux("send-keys", key)
        deadline = time.monotonic() + seconds
        while until not in self.tmux("capture-pane", "-p"):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{until!r} did not appear:\n{self.tmux('capture-pane', '-p')}"
                )
            time.sleep(0.1)

    def wait_for_prompt(self, seconds: float = 30) -> None:
        """Wait until the command has ended; keys that are pressed before would be shown twice."""
        deadline = time.monotonic() + seconds
        while not self.tmux("capture-pane", "-p").rstrip().endswith("\n$"):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the command did not end:\n{self.tmux('capture-pane', '-p')}"
                )
            time.sleep(0.1)

    def save(self, name: str, title: str) -> None:
        """Write the screen as it is now to NAME.txt and NAME.svg."""
        ansi = self.tmux("capture-pane", "-p", "-e").rstrip() + "\n"
        console = Console(
            record=True, width=self.width, file=StringIO(), force_terminal=True
        )
        console.print(Text.from_ansi(ansi))
        plain = (
            "\n".join(
                line.rstrip() for line in console.export_text(clear=False).splitlines()
            ).strip()
            + "\n"
        )
        (HERE / f"{name}.txt").write_text(plain.replace(self.folder, "~"), "utf-8")
        console.save_svg(str(HERE / f"{name}.svg"), title=title, clear=False)
        svg = HERE / f"{name}.svg"
        svg.write_text(svg.read_text("utf-8").replace(self.folder, "~"), "utf-8")


def check(folder: str) -> None:
    """Check a file with four mistakes."""
    bad = "mixed_precision: bf61\nfsdp:\n  cpu_offlaod: true\nlaunch:\n  num_processes: two\nzero_stage: 3\n"
    Path(folder, "train.yaml").write_text(bad, "utf-8")
    with Screen(folder, height=16) as screen:
        screen.press("hasten config check train.yaml", "Enter", until="4. ")
        screen.save("config-check", "hasten config check")


def main() -> None:
    """Capture all screens."""
    for capture in (check,):
        with tempfile.TemporaryDirectory() as folder:
            capture(folder)


if __name__ == "__main__":
    main()
