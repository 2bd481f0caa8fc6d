"""The command `accelerate`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from accelerate._impl.checkpoints import merge
from accelerate._impl.commands import answered, config, estimate, launch, to_fsdp2, tpu

COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "config": (config.run, "write a settings file, by questions or for this machine"),
    "estimate-memory": (estimate.run, "the memory a model on the Hub needs"),
    "env": (answered.run_env, "a report of this machine for an issue"),
    "launch": (launch.run, "start a script on all devices and machines"),
    "merge-weights": (merge.run, "one model out of a sharded checkpoint"),
    "test": (answered.run_test, "check that training works under the current settings"),
    "to-fsdp2": (to_fsdp2.run, "a settings file with FSDP2's names"),
    "tpu-config": (tpu.run, "run commands on the machines of a TPU pod"),
}


def main() -> None:
    """Run `accelerate COMMAND …`; exits the process only with another code than 0."""
    words = sys.argv[1:]
    if not words or words[0] not in COMMANDS:
        sys.exit(_explain(words))
    if code := COMMANDS[words[0]][0](words[1:]):
        sys.exit(code)


def _explain(words: Sequence[str]) -> int:
    """Say which commands there are; the exit code."""
    rows = "\n".join(f"  {name:<17}{text}" for name, (_, text) in COMMANDS.items())
    asked = bool(words) and words[0] in ("-h", "--help")
    out = sys.stdout if asked or not words else sys.stderr
    if words and not asked:
        out.write(f"accelerate: there is no command {words[0]!r}.\n")
    out.write(f"usage: accelerate <command> [<args>]\n\ncommands:\n{rows}\n")
    return 0 if asked else 2 if words else 1
