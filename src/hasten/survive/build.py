"""Start of a replica from its settings, and refusal of settings that cannot lose replicas."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from hasten.config.root import Config
from hasten.config.sections.launch import SurviveSettings
from hasten.errors import ConfigError
from hasten.optim.clock import StepClock
from hasten.optional import check_installed
from hasten.prepare_args import PreparedObjects
from hasten.runtime import env, secret
from hasten.runtime.context import ProcessContext
from hasten.survive.coordination import VERSIONS, WHY
from hasten.survive.replica import Replica


def check(config: Config) -> None:
    """Raise for settings that cannot be combined with replicas that may be lost.

    Raises: ConfigError; MissingPackageError without torchft.
    """
    check_installed("torchft", VERSIONS, WHY)
    settings = config.survive
    if settings.replica is None or settings.replicas < 1:
        raise ConfigError(
            f"survive.lighthouse={settings.lighthouse} was given with replica={settings.replica} and replicas={settings.replicas}, so the others could "
            "not tell this replica from themselves. Give each replica a name and the number of all, or use `hasten launch --replicas`."
        )
    for found, why, instead in _refused(config):
        raise ConfigError(f"survive cannot be combined with {found}: {why}. {instead}")


def _refused(config: Config) -> list[tuple[str, str, str]]:
    """Return the settings that survive does not support: their names, the reasons, and what to use instead."""
    names = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "pp_size", "ep_size")
    sizes = {name: getattr(config.parallelism, name) for name in names}
    divided = [f"{name}={size}" for name, size in sizes.items() if size not in (None, 1, -1)]
    rows: list[tuple[bool, str, str, str]] = [
        (
            bool(divided),
            f"parallelism of {', '.join(divided)}",
            "a replica is one process that holds the whole model, so there are no further processes to divide it over",
            "Leave the sizes out, or use --max_restarts with checkpoint_in_memory.",
        ),
        (
            config.strategy not in ("auto", "none", "ddp"),
            f"strategy={config.strategy!r}",
            "a replica is one process that holds the whole model, and this strategy spreads it over several or owns its gradients",
            "Use strategy='auto', or --max_restarts with checkpoint_in_memory.",
        ),
        (
            config.mixed_precision == "fp16",
            "mixed_precision='fp16'",
            "each replica would adapt a loss scale of its own and skip other updates than the others",
            "Use 'bf16'.",
        ),
        (
            config.trust.numbers not in ("off", "report"),
            f"trust.numbers={config.trust.numbers!r}",
            "the decision of one replica about its loss would not reach the others, and their weights would differ",
            "Use 'report' or 'off'.",
        ),
        (
            config.checkpoint_in_memory is not None,
            f"checkpoint_in_memory={config.checkpoint_in_memory}",
            "the other replicas hold the run's state already, and a returning replica takes it from them",
            "Leave it out.",
        ),
        (
            config.gradient_accumulation.sync_each_batch,
            "sync_each_batch=True",
            "gradients are exchanged once for each update, where all replicas agree on its members",
            "Leave it out.",
        ),
    ]
    return [row[1:] for row in rows if row[0]]


def refuse_worlds(ctx: ProcessContext, settings: SurviveSettings) -> None:
    """Raise ConfigError if this replica has several processes."""
    if ctx.world.size > 1:
        raise ConfigError(
            f"replica {settings.replica} has {ctx.world.size} processes, and survive supports replicas of one process: the loss of one of several would "
            "have to be agreed on inside the replica first. Start one process for each replica, with --replicas and without --num_processes."
        )


def start(
    config: Config,
    prepared: PreparedObjects,
    unwrap: Callable[[nn.Module], nn.Module],
    clock: StepClock,
) -> Replica:
    """Return this process's replica, known to the lighthouse, and let updates exchange gradients through it."""
    variables = env.snapshot()
    token = secret.given_token(variables) or secret.user_secret(variables)
    made = Replica(config.survive, prepared, unwrap, clock, token)
    clock.exchange = made.exchange
    return made
