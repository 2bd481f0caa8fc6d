"""Start of a replica from its settings, and refusal of settings that cannot lose replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hasten.config.root import Config
from hasten.data.source import BatchSource
from hasten.errors import ConfigError
from hasten.extensions.survive.coordination import TORCHFT_PURPOSE, TORCHFT_VERSIONS
from hasten.extensions.survive.replica import Replica
from hasten.extensions.survive.report import SurvivalReport
from hasten.extensions.survive.run_state import RunState
from hasten.extensions.survive.settings import SurviveSettings
from hasten.extensions.survive.source import LedgerSource
from hasten.optim.run_part import RunPart, RunParts
from hasten.optim.window import Holder
from hasten.optional import check_installed
from hasten.runtime import env, secret
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import mesh_title


def check_config(config: Config) -> None:
    """Raise for settings that cannot be combined with replicas that may be lost.

    Raises: ConfigError; MissingPackageError without torchft.
    """
    settings = config.section(SurviveSettings)
    if None in (settings.lighthouse, settings.replica, settings.folder):
        raise ConfigError(
            f"survive.replicas={settings.replicas} was set without the launcher, which names the replicas and the lighthouse, so this process would train "
            f"alone; start the script with `hasten launch --replicas {settings.replicas}`, or remove the setting."
        )
    check_installed("torchft", TORCHFT_VERSIONS, TORCHFT_PURPOSE)
    for refused_setting, reason, alternative in _list_refused_settings(config):
        raise ConfigError(
            f"survive cannot be combined with {refused_setting}: {reason}. {alternative}"
        )


def _list_refused_settings(config: Config) -> list[tuple[str, str, str]]:
    """Return the settings that survive does not support: their names, the reasons, and what to use instead."""
    size_names = (
        "dp_replicate_size",
        "tp_size",
        "cp_size",
        "sp_size",
        "pp_size",
        "ep_size",
    )
    divided_sizes = []
    for size_name in size_names:
        mesh_size = getattr(config.parallelism, size_name)
        if mesh_size not in (None, 1, -1):
            divided_sizes.append(f"{size_name}={mesh_size}")
    refusals: list[tuple[bool, str, str, str]] = [
        (
            bool(divided_sizes),
            f"parallelism of {', '.join(divided_sizes)}",
            "the ranks of a replica read different samples and hold the whole model, by DDP, or shards of it, by FSDP2, and nothing else was tried",
            "Leave the sizes out, or use --max_restarts with checkpoint_in_memory.",
        ),
        (
            config.strategy not in ("auto", "none", "ddp", "fsdp"),
            f"strategy={config.strategy!r}",
            "the gradients of a replica are exchanged from its parameters, and this strategy keeps them elsewhere",
            "Use strategy='ddp' or 'fsdp', or --max_restarts with checkpoint_in_memory.",
        ),
        (
            config.mixed_precision == "fp16",
            "mixed_precision='fp16'",
            "each replica would adapt a separate loss scale and skip other updates than the others",
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
            config.offload is not None,
            f"offload={config.offload!r}",
            "replicas send the state of optimizers to each other from the device",
            "Leave it out.",
        ),
        (
            config.gradient_accumulation.sync_each_batch,
            "sync_each_batch=True",
            "gradients are exchanged once for each update, where all replicas agree on its members",
            "Leave it out.",
        ),
    ]
    refused_settings = []
    for refusal in refusals:
        if refusal[0]:
            refused_settings.append(refusal[1:])
    return refused_settings


def refuse_meshes(ctx: ProcessContext, settings: SurviveSettings) -> None:
    """Raise ConfigError unless the ranks of this replica all read different samples, by DDP or by FSDP2."""
    mesh = ctx.mesh
    num_ranks = ctx.world.size
    if num_ranks not in (mesh.dp_replicate, mesh.dp_shard) or mesh.ep > 1:
        raise ConfigError(
            f"replica {settings.replica} has {num_ranks} processes in a mesh of {mesh_title(mesh)}, and survive supports replicas whose processes hold the "
            "whole model each (DDP) or one shard of it each (FSDP2). Leave the sizes of the mesh out, and let --replicas take the place of "
            "dp_replicate_size."
        )


def find_replica(run_parts: RunParts) -> Replica:
    """Return the replica among the parts of a run."""
    return next(
        run_part.replica
        for run_part in run_parts.members
        if isinstance(run_part, Survive)
    )


# Any: an Accelerator, in an upper layer
def survival_report(accelerator: Any) -> SurvivalReport:
    """Return the lost, returned and healed replicas of a run of replicas, as seen by this one."""
    return find_replica(accelerator._clock.parts).report


class Survive(RunPart):
    """The replica of this rank in a run that continues when others are lost."""

    replica: Replica
    """Set when the Accelerator is built."""

    # Any: the components of the Accelerator, in an upper layer
    def built(self, components: Any) -> None:
        """Make this replica known to the lighthouse. Ranks: every rank. Raises: ConfigError for settings and worlds without support."""
        accelerator = components.accelerator
        config = components.accelerator.config
        settings = config.section(SurviveSettings)
        check_config(config)
        refuse_meshes(accelerator.ctx, settings)
        variables = env.snapshot()
        token = secret.read_token(variables) or secret.user_secret(variables)
        run_state = RunState(components.prepared, components.strategy.unwrap)
        self.replica = replica = Replica(
            settings,
            components.prepared,
            run_state,
            components.clock,
            accelerator.ctx,
            token,
        )
        self._clock = components.clock
        self._num_replicas = settings.replicas
        if components.run_log is not None:
            replica.note = components.run_log.record_event
        accelerator.process.leads = lambda: replica.duties.leads
        preemption = components.preemption
        saving = components.saving
        replica.duties.received = lambda: preemption.received
        preemption.decide = lambda: replica.leaves
        saving.register_for_checkpointing(replica)
        run_state.registered = lambda: [
            stateful for stateful in saving.registered if stateful is not replica
        ]

    def source(self, source: BatchSource) -> BatchSource:
        """Read the positions that the ledger gives to this replica."""
        return LedgerSource(source, self.replica, self._clock, self._num_replicas)

    def gradients(self, optimizer: Holder) -> bool:
        """Average the gradients over the replicas; skip the update of a replica that was healed."""
        return self.replica.exchange_gradients(optimizer)

    def before_save(self) -> str | None:
        """Let the first of the present replicas save: all hold the same state."""
        return None if self.replica.duties.leads else ""

    # Any: numbers, strings and tensors
    def log(self, logged_values: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Log nothing while this replica, which was healed, is in an epoch that the run has completed."""
        return None if self.replica.duties.behind else logged_values

    def status(self) -> Mapping[str, float | str]:
        """Return the replicas of the run."""
        return self.replica.report.list_status(self.replica.name)

    def end(self) -> None:
        """Leave the run, which has ended."""
        self.replica.finish_run()
