"""Photograph the quickstart: its script in a real terminal (tmux), its report and the built site in a real browser (Chromium).

Run `make docs && python docs/screens/quickstart.py` from the root of the repository; tmux and chromium must be installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from capture import HERE, Screen
from PIL import Image

DOCS = HERE.parent
SITE = DOCS.parent / "build" / "site"


def photograph(address: str, file: Path, width: int = 1200, height: int = 900) -> None:
    """Write what Chromium shows of a page, in few colours."""
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder, "page.png")
        chromium = [
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
        ]
        options = [
            f"--user-data-dir={folder}/profile",
            f"--window-size={width},{height}",
            "--virtual-time-budget=20000",
        ]
        command = [*chromium, *options, f"--screenshot={picture}", address]
        subprocess.run(command, check=True, capture_output=True, timeout=200)
        Image.open(picture).convert("RGB").quantize(64).save(file, optimize=True)


def main() -> None:
    """Write quickstart.svg and quickstart.txt here, and quickstart.png and site.png to docs/pictures."""
    (script,) = re.findall(
        r"```python[^\n]*\n(.*?)```",
        (DOCS / "quickstart.md").read_text("utf-8"),
        re.DOTALL,
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(script, "utf-8")
        with Screen(folder, height=24) as screen:
            command = "hasten launch --cpu --num_processes 2 train.py"
            screen.press(command, "Enter", until="epoch 4: ", seconds=200)
            screen.wait_for_prompt()
            screen.press(
                "hasten ckpt list runs/first", "Enter", until="checkpoint_4", seconds=60
            )
            screen.save("quickstart", "the quickstart")
        report = [
            sys.executable,
            "-m",
            "hasten.cli.main",
            "report",
            "runs/first",
            "-o",
            "first.html",
        ]
        subprocess.run(report, cwd=folder, check=True)
        photograph(
            Path(folder, "first.html").as_uri(), DOCS / "pictures" / "quickstart.png"
        )
    photograph(
        (SITE / "quickstart.html").as_uri(), DOCS / "pictures" / "site.png", 1280, 800
    )


if __name__ == "__main__":
    main()
