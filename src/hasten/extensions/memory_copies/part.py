"""In-memory copies of a run's newest state: made after updates, fetched from another machine on failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hasten.accelerator.components import Components
from hasten.checkpoint.format.manifest import (
    FileRecord,
    Manifest,
    decode_manifest,
    numbered_checkpoint,
)
from hasten.checkpoint.store.local_store import LocalStore
from hasten.comm.agreement import Agreement, agreeing
from hasten.errors import ConfigError
from hasten.extensions.memory_copies.memory_folder import (
    MemoryChoice,
    MemoryCopy,
    MemoryFolder,
    explain_loss,
    group_by_folder,
    neighbour_of,
    newest_common,
)
from hasten.optim.loader_progress import LoaderCursor
from hasten.optim.run_part import RunPart
from hasten.runtime import env
from hasten.runtime.context import ProcessContext
from hasten.runtime.logs import get_logger
from hasten.runtime.mesh_plan import Axis

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CopyHolder:
    """This rank's machine among the machines of the job."""

    index: int
    all: tuple[tuple[int, ...], ...]
    """The ranks of each machine."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this machine."""
        return self.all[self.index]

    @property
    def alone(self) -> bool:
        """True if the job has one machine."""
        return len(self.all) == 1


@dataclass(frozen=True, slots=True)
class CopyTransfer:
    """Transfer of a state from one machine to another; files `alike` are there already."""

    source: int
    target: int
    copy: MemoryCopy
    raw: bytes
    manifest: Manifest
    equal_files: tuple[FileRecord, ...] = ()


class MemoryCopies(RunPart):
    """In-memory copies of two steps: the newest that every machine has, and the one that is being copied."""

    needs_even_batches = (
        "checkpoint_in_memory: all ranks make the copies together, and here some have no batch left after which to make one. Use "
        "even_batches=True, or leave checkpoint_in_memory out."
    )

    def built(self, run: Components) -> None:
        """Find the folder of the launcher. Raises: ConfigError where copies could not be used."""
        accelerator = run.accelerator
        every = accelerator.config.checkpoint_in_memory
        assert every is not None, "the setting turns this part on"
        self._ctx: ProcessContext = accelerator.ctx
        self._saving = run.saving
        self._loaders = run.clock.loaders
        self._every = every
        self._folder = MemoryFolder.of_this_process(memory_root(self._ctx, every))
        self._machine: CopyHolder | None = None
        self._newest: int | None = None
        """The newest step that every machine and its neighbour hold in memory."""
        self._space_checked = False
        self._saving.newer_states = self

    # -- copying ----------------------------------------------------------------------------------------------------
    def batch(self, cursor: LoaderCursor) -> None:
        """Copy when the training loop requests the next batch from its loader: no update is in progress then."""
        watched = self._loaders.watched
        is_outermost = bool(watched) and watched[0] is cursor
        if is_outermost and self._saving.step - (self._newest or 0) >= self._every:
            self.copy()

    def copy(self) -> None:
        """Copy the current state, on this machine and to its neighbour. Ranks: every rank."""
        world = self._ctx.world
        step = self._saving.step
        with agreeing(
            world, "checkpoint_in_memory", self._saving.project.checkpoint_arrival_s
        ) as agreement:
            machine = self._machine_group(agreement)
            if self._is_first_rank(machine):
                newest_steps = [] if self._newest is None else [self._newest]
                self._folder.keep_only(newest_steps)
            self._saving.write_machine(
                self._folder.open_store(machine.ranks),
                numbered_checkpoint(step),
                machine.index,
                machine.ranks,
                agreement,
                lambda size: self._check_space(size, agreement),
            )
            if not machine.alone:
                agreement.label = "sending the state to the neighbour"
                self._send_all(machine, step, agreement)
        if self._newest is None:
            log.info(
                "the state is kept in memory every %d updates%s",
                self._every,
                _reach_text(machine),
            )
        self._newest = step

    def _machine_group(self, agreement: Agreement) -> CopyHolder:
        if self._machine is None:
            machines = tuple(group_by_folder(agreement.share(str(self._folder.root))))
            holds_rank = [self._ctx.rank in ranks for ranks in machines]
            self._machine = CopyHolder(holds_rank.index(True), machines)
        return self._machine

    def _is_first_rank(self, machine: CopyHolder) -> bool:
        return self._ctx.rank == machine.ranks[0]

    def _check_space(self, size: int, agreement: Agreement) -> None:
        """Raise ConfigError if the copies do not fit into memory, at the first copy, when all sizes are known."""
        if self._space_checked:
            return
        machine = self._machine_group(agreement)
        sizes_of_ranks: list[int] = agreement.share(size)
        own_bytes = sum(sizes_of_ranks[rank] for rank in machine.ranks)
        neighbour_bytes = 0
        if not machine.alone:
            neighbour_ranks = machine.all[machine.index - 1]
            neighbour_bytes = sum(sizes_of_ranks[rank] for rank in neighbour_ranks)
        needed_bytes = 2 * (own_bytes + neighbour_bytes)
        free_bytes = self._folder.free_bytes()
        if needed_bytes > free_bytes:
            raise ConfigError(
                f"checkpoint_in_memory needs up to {needed_bytes / 1e6:,.1f} MB in {self._folder.root.parent.parent} on this machine (two steps of "
                f"{own_bytes / 1e6:,.1f} MB for this machine and {neighbour_bytes / 1e6:,.1f} MB for its neighbour), where {free_bytes / 1e6:,.1f} MB are free. Give the "
                "machine a larger /dev/shm (in a container, by its shm size), or leave checkpoint_in_memory out."
            )
        log.info(
            "checkpoint_in_memory uses up to %.1f MB of memory on this machine",
            needed_bytes / 1e6,
        )
        self._space_checked = True

    def _send_all(self, machine: CopyHolder, step: int, agreement: Agreement) -> None:
        own_copy = MemoryCopy(machine.ranks, self._ctx.world.size, step)
        own_manifest = None
        if self._is_first_rank(machine):
            own_manifest = self._folder.read_manifest(own_copy)
        manifests_of_ranks: list[bytes | None] = agreement.share(own_manifest)
        raw_manifests = []
        manifests = []
        for ranks in machine.all:
            raw_manifest = manifests_of_ranks[ranks[0]]
            assert raw_manifest is not None, "the first rank of a machine shares it"
            raw_manifests.append(raw_manifest)
            manifests.append(decode_manifest(raw_manifest, "the neighbour's manifest"))
        transfers = []
        for source, ranks in enumerate(machine.all):
            target = neighbour_of(source, len(machine.all))
            target_files = set()
            for file in manifests[target].files:
                target_files.add((file.name, file.size, file.sums))
            alike = []
            for file in manifests[source].files:
                if file.size and (file.name, file.size, file.sums) in target_files:
                    alike.append(file)
            copy = MemoryCopy(ranks, self._ctx.world.size, step)
            transfers.append(
                CopyTransfer(
                    source,
                    target,
                    copy,
                    raw_manifests[source],
                    manifests[source],
                    tuple(alike),
                )
            )
        self._transfer_states(
            transfers, machine, agreement, like=self._folder.state_folder(own_copy)
        )

    # -- moving -----------------------------------------------------------------------------------------------------
    def _transfer_states(
        self,
        transfers: Sequence[CopyTransfer],
        machine: CopyHolder,
        agreement: Agreement,
        like: Path,
    ) -> None:
        """Transfer states between machines. Ranks: every rank."""
        if self._is_first_rank(machine):
            own_transfers = []
            for transfer in transfers:
                if transfer.target == machine.index:
                    own_transfers.append(transfer)
        else:
            own_transfers = []
        with ExitStack() as arriving:
            for transfer in own_transfers:
                arriving.enter_context(
                    self._folder.receive_state(
                        transfer.copy, transfer.raw, transfer.equal_files, like
                    )
                )
            agreement.share()  # the folders exist
            sends, receives = self._tensors_to_exchange(transfers, machine)
            # failed ranks have reported: no rank waits for a file that never arrives
            agreement.share()
            self._ctx.world.exchange(sends, receives)
            del sends, receives  # unmap the files
            agreement.share()
        agreement.share()

    def _tensors_to_exchange(
        self, transfers: Sequence[CopyTransfer], machine: CopyHolder
    ) -> tuple[list[tuple[int, Tensor]], list[tuple[int, Tensor]]]:
        """Return the files this rank sends and receives; files of a state are distributed over a machine's ranks."""
        sends: list[tuple[int, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        for transfer in transfers:
            senders = machine.all[transfer.source]
            receivers = machine.all[transfer.target]
            files_to_send = []
            for file in transfer.manifest.files:
                if file.size and file not in transfer.equal_files:
                    files_to_send.append(file)
            for index, file in enumerate(files_to_send):
                sender = senders[index % len(senders)]
                receiver = receivers[index % len(receivers)]
                if sender == self._ctx.rank:
                    sends.append(
                        (
                            receiver,
                            _map_file(
                                self._folder.state_folder(transfer.copy) / file.name,
                                file.size,
                                False,
                            ),
                        )
                    )
                if receiver == self._ctx.rank:
                    receives.append(
                        (
                            sender,
                            _map_file(
                                self._folder.arriving_folder(transfer.copy) / file.name,
                                file.size,
                                True,
                            ),
                        )
                    )
        return sends, receives

    # -- resuming ---------------------------------------------------------------------------------------------------
    def newest(self, agreement: Agreement) -> MemoryChoice | None:
        """Return the newest step that all machines can resume from; None, with a logged reason. Ranks: every rank."""
        machine = self._machine_group(agreement)
        copies_of_ranks: list[list[MemoryCopy]] = agreement.share(
            self._folder.list_states() if self._is_first_rank(machine) else []
        )
        copies_of_machines = [copies_of_ranks[ranks[0]] for ranks in machine.all]
        choice = newest_common(copies_of_machines, machine.all)
        if choice is None and (
            any(copies_of_machines) or self._ctx.topology.restart_count
        ):
            log.warning(
                "the state is not taken from memory: %s. Looking for the newest checkpoint on the disk",
                explain_loss(copies_of_machines, machine.all),
            )
        return choice

    def fetch(
        self, choice: MemoryChoice, agreement: Agreement
    ) -> tuple[LocalStore, str]:
        """Return store and name of the state here, after transfers to machines without it. Ranks: every rank."""
        machine = self._machine_group(agreement)
        size = self._ctx.world.size
        agreement.label = f"fetching the state of update {choice.step} from the memory of other machines"
        moves = []
        for target, source in enumerate(choice.sources):
            if source != target:
                moves.append((source, target))
        if moves:
            own_manifests: dict[int, bytes] = {}
            for source, target in moves:
                if source == machine.index and self._is_first_rank(machine):
                    copy = MemoryCopy(machine.all[target], size, choice.step)
                    own_manifests[target] = self._folder.read_manifest(copy)
            manifests_of_ranks: list[Mapping[int, bytes]] = agreement.share(
                own_manifests
            )
            transfers = []
            for source, target in moves:
                raw_manifest = manifests_of_ranks[machine.all[source][0]][target]
                copy = MemoryCopy(machine.all[target], size, choice.step)
                transfers.append(
                    CopyTransfer(
                        source,
                        target,
                        copy,
                        raw_manifest,
                        decode_manifest(raw_manifest, "the neighbour's manifest"),
                    )
                )
            self._transfer_states(transfers, machine, agreement, like=Path())
            log.info(
                "machine %s got its state from a neighbour",
                ", ".join(str(target) for _, target in moves),
            )
        return self._folder.open_store(machine.ranks), numbered_checkpoint(choice.step)

    def loaded(self, step: int | None) -> None:
        """Delete every state except the loaded one (None: one from elsewhere), since later ones are obsolete."""
        self._folder.keep_only(() if step is None else {step})
        self._newest = step


def memory_root(ctx: ProcessContext, every: int) -> Path:
    """Return the in-memory folder that outlives this process.

    Raises: ConfigError when there is none, when no launcher would restart the run, or the mesh does not allow copies.
    """
    variables = env.snapshot()
    setting_text = f"checkpoint_in_memory={every}"
    if ctx.mesh.size(Axis.PP) > 1:
        raise ConfigError(
            f"{setting_text} cannot be combined with pipeline parallelism: the stages of a checkpoint are put together over machines. Leave it out, and "
            "call save_state() every so many updates."
        )
    if (memory_folder := variables.get(env.MEMORY_FOLDER)) is None:
        raise ConfigError(
            f"{setting_text} keeps the state in memory that belongs to the launcher, so that it outlives this process; this process was not started by "
            "`hasten launch` (with its own agent, not by srun or mpirun), so nothing would be left after a failure. Start it that way, or leave "
            "checkpoint_in_memory out."
        )
    if variables.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        raise ConfigError(
            f"{setting_text} has no effect without restarts: the launcher ends after the first failure, and the copies with it. Start with "
            "`hasten launch --max_restarts N`, or leave checkpoint_in_memory out."
        )
    return Path(memory_folder)


def _map_file(path: Path, size: int, writes: bool) -> Tensor:
    """Return the memory-mapped bytes of a file; `writes` creates the file."""
    return torch.from_file(str(path), shared=writes, size=size, dtype=torch.uint8)


def _reach_text(machine: CopyHolder) -> str:
    if machine.alone:
        return ", on this machine only: the job has no other, so a copy survives lost processes but not a lost machine"
    return f", on each of {len(machine.all)} machines and at its neighbour"
