"""`hasten predict`: applies a model or function to all rows of a file, on all processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hasten.cli.flags import SettingsParser, run_module, whole_number
from hasten.errors import ConfigError
from hasten.extensions.predict.rows import KINDS

ESSENTIAL: Final = frozenset(
    (
        "mixed_precision",
        "cpu",
        "num_processes",
        "gpu_ids",
        "num_machines",
        "main_process_ip",
        "quiet",
    )
)


def main(argv: Sequence[str]) -> int:
    """Run `hasten predict …` and return the exit code of the job."""
    parser = SettingsParser(
        prog="hasten predict",
        usage="hasten predict MODEL DATA -o FILE.jsonl [--batch_size N] [settings of hasten launch]",
        description="Predict every row of a file, batch by batch on all processes, and write one line per row in the file's order. "
        "MODEL is module:name: a function that takes a list of rows and returns a list of results, or a class that is created once per "
        "process and called in the same way. If it is started again after a failure, only the missing batches are computed. See docs/predict.md.",
        essential=ESSENTIAL,
        flags_anywhere=True,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="module:function or module:Class"
    )
    parser.add_argument(
        "data", type=Path, metavar="DATA", help="a .jsonl, .csv, .tsv or .txt file"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE.jsonl",
        help="one line per row",
    )
    parser.add_argument(
        "--batch_size",
        "--batch-size",
        type=whole_number(),
        default=32,
        metavar="N",
        help="rows per call (32)",
    )
    parser.add_argument(
        "--config_file",
        "--config-file",
        metavar="FILE",
        help="a settings file of hasten or of Accelerate",
    )
    parser.add_argument(
        "--dry_run",
        "--dry-run",
        action="store_true",
        help="print the plan without starting anything",
    )
    parser.add_settings()
    arguments = parser.parse_args(argv)
    check_arguments(
        arguments.model, arguments.data, arguments.output, arguments.batch_size
    )
    program_words = [
        "hasten.extensions.predict.program",
        arguments.model,
        str(arguments.data),
        str(arguments.output),
        str(arguments.batch_size),
    ]
    return run_module(program_words, "hasten predict", arguments, argv)


def check_arguments(model: str, data: Path, output: Path, batch_size: int) -> None:
    """Raise for arguments that cannot work, before processes are started.

    Raises: ConfigError that names the argument.
    """
    if not all(model.partition(":")):
        raise ConfigError(
            f"MODEL={model} is not module:function, so there is nothing to call; name a function or a class."
        )
    if not data.is_file():
        raise ConfigError(
            f"DATA={data} does not exist, so there is nothing to predict; give a .jsonl, .csv, .tsv or .txt file."
        )
    if data.suffix not in KINDS:
        raise ConfigError(
            f"DATA={data} ends neither in {' nor in '.join(KINDS)}, so its format is unknown; convert it to JSON lines, one "
            "object per row."
        )
    if output.suffix != ".jsonl":
        raise ConfigError(
            f"--output={output} does not end in .jsonl, but one line of JSON is written per row; rename it."
        )
    if batch_size < 1:
        raise ConfigError(
            f"--batch_size={batch_size} leaves no row in a batch; set it to 1 or more."
        )
