"""`hasten launch`: builds a plan from file, environment and flags, and prints or runs it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from hasten.cli.flags import SettingsParser
from hasten.config.source import SettingEntry
from hasten.errors import ConfigError, HastenError

if TYPE_CHECKING:
    from hasten.launch.job import Job

DESCRIPTION: Final = (
    "Start a script on all devices of this machine, or of several machines. On several machines run the same command on each, with the "
    "same --num_machines and --main_process_ip; under SLURM start it with srun, without these flags. --dry-run prints the plan. See "
    "docs/launch.md."
)


ESSENTIAL: Final = frozenset(
    (
        *(
            "mixed_precision",
            "strategy",
            "cpu",
            "debug",
            "gradient_accumulation_steps",
            "project_dir",
            "log_with",
        ),
        *(
            "num_processes",
            "processes_per_machine",
            "num_machines",
            "nnodes",
            "machine_rank",
            "main_process_ip",
        ),
        *(
            "main_process_port",
            "gpu_ids",
            "num_cpu_threads_per_process",
            "max_restarts",
            "log_dir",
        ),
        *("module", "no_python", "quiet", "submit", "dynamo_backend"),
        *(
            "dp_replicate_size",
            "dp_shard_size",
            "tp_size",
            "cp_size",
            "pp_size",
            "ep_size",
        ),
    )
)
"""The settings that `hasten launch --help` shows; `--help-all` shows all."""


def main(
    argv: Sequence[str], program: str = "hasten", settings: Sequence[SettingEntry] = ()
) -> int:
    """Run `hasten launch …` and return the exit code of the job; `program` is the command name in help and errors.

    `settings` are additional settings; those given in code override flags and files.
    """
    arguments = make_parser(program).parse_args(argv)
    arguments.settings = [*arguments.settings, *settings]
    if arguments.script[:1] == ["--"]:
        words: list[str] = arguments.script[1:]
    else:
        words = arguments.script
    try:
        return _prepare_and_launch(
            arguments, words, argv[: len(argv) - len(arguments.script)]
        )
    except HastenError as error:
        from hasten.launch import failure  # only needed by a launch that failed

        failure.write_verdict(str(error))
        raise


def _prepare_and_launch(
    arguments: argparse.Namespace, words: list[str], typed: Sequence[str]
) -> int:
    from hasten.launch.job import prepare  # so that --help is fast

    job = prepare(
        words,
        settings=arguments.settings,
        config_file=arguments.config_file,
        typed=typed,
    )
    if not job.request.config.launch.quiet:
        for note in job.resolved.notes:
            sys.stderr.write(f"[hasten] note: {note}\n")
    if arguments.output == "yaml":
        sys.stdout.write(_manifest_text(arguments, job))
        return 0
    if arguments.dry_run:
        sys.stdout.write(job.plan.render_text() + "\n" + job.describe_mesh())
        return 0
    return job.run()


def _manifest_text(arguments: argparse.Namespace, job: Job) -> str:
    """Return the manifest alone, as `kubectl apply -f -` reads it."""
    if (
        not arguments.dry_run
        or job.launch_target is None
        or not job.launch_target.runs_in_image
    ):
        raise ConfigError(
            "-o yaml prints the manifest of a job that is submitted with one. Add --submit NAME --dry_run, or remove it."
        )
    return "".join(planned.text for planned in job.plan.files)


def make_parser(program: str = "hasten") -> SettingsParser:
    """Return the parser of the command line, with every setting and the options of launching."""
    parser = SettingsParser(
        prog=f"{program} launch",
        usage=f"{program} launch [settings] script.py [arguments of the script]",
        description=DESCRIPTION,
        essential=ESSENTIAL,
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
    parser.add_argument(
        "-o",
        "--output",
        choices=("yaml",),
        help="with --submit NAME --dry_run: print the job's manifest alone",
    )
    parser.add_settings()
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        help="the script (or module, or program) and its arguments",
    )
    return parser
