"""Install the built wheels into an empty environment, away from the checkout, and run them there as a new user would.

    python tests/release/try_wheels.py dist constraints.txt

The script of the quickstart trains on one process and on two; a script written for Hugging Face Accelerate trains through
the drop-in. `make dist` runs this after building.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]

ESTABLISHED = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
inputs = torch.randn(256, 4)
labels = (inputs.sum(1) > 0).long()
data = torch.utils.data.TensorDataset(inputs, labels)
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
model = torch.nn.Linear(4, 2)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05), loader)
for _ in range(5):
    for x, y in loader:
        accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
right = (accelerator.unwrap_model(model)(inputs).argmax(1) == labels).float().mean().item()
accelerator.print(f"accuracy {right:.3f} on {accelerator.num_processes} process(es)")
assert right > 0.95, right
"""


def quickstart() -> str:
    """Return the script that docs/quickstart.md shows."""
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    match = re.search(r'```python title="train.py"\n(.*?)```', page, re.DOTALL)
    assert match is not None, "docs/quickstart.md has no train.py any more"
    return match[1]


def run(words: Sequence[str], folder: Path) -> str:
    """Run a command in `folder` without this checkout on its path, print what it prints, and return it."""
    print(
        "$",
        " ".join(
            Path(words[0]).name if i == 0 else word for i, word in enumerate(words)
        ),
        flush=True,
    )
    clean = {
        key: value
        for key, value in os.environ.items()
        if key not in {"PYTHONPATH", "VIRTUAL_ENV"}
    }
    done = subprocess.run(
        words, cwd=folder, env=clean, capture_output=True, text=True, check=False
    )
    print(done.stdout + done.stderr, flush=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)} exited with {done.returncode}")
    return done.stdout


def main(wheels: Path, constraints: Path) -> None:
    """Try every wheel in `wheels`."""
    files = [str(path.resolve()) for path in sorted(wheels.glob("*.whl"))]
    if len(files) != 2:
        sys.exit(
            f"{wheels} holds {len(files)} wheels instead of two: {files}. Run `make dist`."
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "env", with_pip=True)
        binary = folder / "env" / "bin"
        limits = ["--constraint", str(constraints.resolve())]
        run(
            [
                str(binary / "python"),
                "-m",
                "pip",
                "install",
                "--quiet",
                *limits,
                *files,
            ],
            folder,
        )
        (folder / "train.py").write_text(quickstart(), encoding="utf-8")
        (folder / "established.py").write_text(ESTABLISHED, encoding="utf-8")
        where = run(
            [
                str(binary / "python"),
                "-c",
                "import hasten, accelerate; print(hasten.__file__)",
            ],
            folder,
        )
        assert where.startswith(str(folder)), (
            f"the checkout was imported instead of the wheel: {where}"
        )
        two = ["launch", "--cpu", "--num_processes", "2"]
        run([str(binary / "python"), "train.py"], folder)
        run([str(binary / "hasten"), *two, "train.py"], folder)
        run([str(binary / "hasten"), "report", "runs/first"], folder)
        run([str(binary / "python"), "established.py"], folder)
        run([str(binary / "accelerate"), *two, "established.py"], folder)
    print("both wheels train in an empty environment")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
