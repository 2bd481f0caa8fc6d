"""One replica of a run that continues when others are lost: its window of samples, its exchange and its healing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import torch

from hasten.data.batch_plan import derive_seed
from hasten.errors import CommError, HastenError, StepError
from hasten.extensions.survive import healing
from hasten.extensions.survive.coordination import (
    Coordinator,
    Quorum,
    find_local_address,
)
from hasten.extensions.survive.duties import Duties
from hasten.extensions.survive.exchange import (
    LostReplicaError,
    Received,
    ReplicaGroup,
    scale_gradients,
)
from hasten.extensions.survive.folder import AGREED_FILE, FINISHED_FILE, JOINED_PREFIX
from hasten.extensions.survive.healing import HealingPort, NotHealedError, RunStateDict
from hasten.extensions.survive.inside import Inside, address_of_rank, join_addresses
from hasten.extensions.survive.ledger_plan import (
    Ledger,
    PositionRange,
    count_positions,
)
from hasten.extensions.survive.report import SurvivalReport
from hasten.extensions.survive.roles_plan import Member, Roles
from hasten.extensions.survive.run_state import RunState
from hasten.extensions.survive.settings import SurviveSettings
from hasten.optim.clock import StepClock
from hasten.optim.window import Holder
from hasten.prepare_args import PreparedObjects
from hasten.runtime.context import ProcessContext

log = logging.getLogger(__name__)

_JOIN_RETRY_S: Final = 0.2
"""Seconds between two attempts to join a run whose replicas cannot be reached."""
_MAX_STANDING_S: Final = 0.5
"""Seconds for which updates are made by the same members without asking the lighthouse, so that a returning replica waits no longer."""


class Replica:
    """This rank of a replica: gives out its samples, exchanges its gradients, heals others and is healed.

    All ranks of a replica make the same calls. The first one talks to the lighthouse and decides; an update, and healing, happen on all
    of them or on none.
    """

    def __init__(
        self,
        settings: SurviveSettings,
        prepared: PreparedObjects,
        state: RunState,
        clock: StepClock,
        ctx: ProcessContext,
        token: bytes | None,
    ) -> None:
        """Make this replica known to the lighthouse. Ranks: every rank of the replica."""
        assert settings.lighthouse is not None, "checked before"
        assert settings.replica is not None, "checked before"
        assert settings.folder is not None, "checked before"
        self.name = settings.replica
        self.ledger = Ledger(0, 1)
        self.report = SurvivalReport()
        self._settings = settings
        self._prepared = prepared
        self.state = state
        self._clock = clock
        self._token = token
        self._fresh = True
        self._folder = Path(settings.folder)
        self.duties = Duties(self.name, self._folder)
        host = find_local_address(settings.lighthouse)
        self._port = HealingPort(host, token)
        self._inside = inside = Inside(ctx.world, host, settings)
        self._addresses = join_addresses(
            ctx.world.all_gather_object(self._port.address)
        )
        self._coordinator = (
            Coordinator(settings, self._describe_member, inside.has_live_ranks)
            if inside.is_first
            else None
        )
        self._quorum_future: Future[Quorum] | None = None
        self._standing: tuple[Quorum, Roles] | None = None
        """Members of the previous update that make the next one without asking the lighthouse; None to ask."""
        self._next_request = 1
        """Request of this replica for the next exchange: 0 for none, 1 to ask for the members, 2 to end the run as well."""
        self._met_at_s = self._updated_at_s = time.monotonic()
        self._group: ReplicaGroup | None = None
        self._grouped = False
        self.contributors: tuple[str, ...] = ()
        """The replicas whose gradients are in the latest update, in the order of the sum."""
        self._to_heal: list[Member] = []
        self._key = ""
        self._done: tuple[int, int] | None = None
        self._skips_update = False
        self._agreed_at: int | None = None
        self.note: Callable[..., None] = lambda event_kind, **details: None
        """Called with each event of the run's report, and its details."""

    def _describe_member(self) -> Member:
        ledger = self.ledger
        return Member(
            self.name,
            ledger.step,
            ledger.lineage,
            self._fresh,
            self._inside.address,
            self._addresses,
        )

    @property
    def leaves(self) -> bool:
        """True if this replica has to leave the run after a signal. Ranks: every rank of the replica."""
        return not self._inside.vote(not self.duties.leaves)

    # -- samples ---------------------------------------------------------------------------------------------------
    def open_ledger(
        self, num_samples: int, batch_rows: int, drop_last: bool, seed: int
    ) -> None:
        """Create the ledger for a loader of these settings, or compare it with the ledger of the run."""
        ledger = self.ledger
        if ledger.size == 0:
            self.ledger = Ledger(num_samples, batch_rows, drop_last, seed)
        elif (ledger.size, ledger.rows, ledger.drop_last) != (
            num_samples,
            batch_rows,
            drop_last,
        ):
            raise HastenError(
                f"the loader has {num_samples} samples in batches of {batch_rows}, and the run's ledger {ledger.size} in batches of {ledger.rows}, so "
                "positions would mean other samples. Prepare the same training loader first, on all replicas and after a resume."
            )

    def enter_epoch(self, epoch: int) -> None:
        """Join the run if this replica has not, and start the epoch if it is new."""
        if self._fresh:
            self._join_run()
        if epoch > self.ledger.epoch:
            self.ledger.begin_epoch(epoch)

    def round(self, epoch: int) -> list[PositionRange] | None:
        """Return the positions of this replica's next batch, on all ranks; None when the epoch is over, here or for the run."""
        while self.ledger.epoch == epoch:
            ledger = self.ledger
            if not ledger.rounds:
                self._send_state()
            if ledger.exhausted and (ledger.rounds or self._meet_at_epoch_end()):
                return None
            if ledger.exhausted:
                # this replica was healed, and its ledger may have samples again
                continue
            if (
                self._quorum_future is None
                and self._standing is None
                and self._coordinator is not None
            ):
                self._quorum_future = self._coordinator.ask_for_quorum()
            return ledger.deal_batches()[self.name]
        return None

    def _meet_at_epoch_end(self) -> bool:
        """Meet the others at the end of an epoch: the replicas that are behind are healed before any replica leaves.

        Returns: False when this replica was healed.
        """
        healed_names: list[str] = []
        while True:
            _, roles = self._meet_members()
            if not roles.is_active(self.name):
                if self._receive_state(roles):
                    return False
                continue
            self.duties.record_epoch_end(roles.contributors, healed_names)
            healed_names += self._note_joined(roles)
            self.ledger.members = roles.names
            self._to_heal = roles.healed_by(self.name)
            self._send_state()
            if not roles.healing:
                self._note_agreed()
                return True

    # -- updates ---------------------------------------------------------------------------------------------------
    def exchange_gradients(self, holder: Holder) -> bool:
        """Set the gradients to their mean over the replicas, once in each window.

        Returns: True if this replica was healed instead: it has the run's newest state, and the update must be skipped.
        """
        window_key = (self._clock.serial, self._clock.num_updates)
        if window_key == self._done:
            return self._skips_update
        if self._fresh:
            raise StepError(
                "step() came before the first batch of the training loader, so this replica has not joined the run and does not know the "
                "others. Iterate over the loader that was prepared first, and call step() inside that loop."
            )
        began_s = time.monotonic()
        num_retries = 0
        # the first attempt is short, so that the lighthouse is soon asked which replicas are left
        timeout_s = self._settings.heartbeat_timeout_s
        while True:
            quorum, roles = self._meet_members(may_stand=True)
            if not roles.is_active(self.name):
                if not self._receive_state(roles, in_step=True):
                    continue
                self._done = (self._clock.serial, self._clock.num_updates)
                self._skips_update = True
                return True
            try:
                self._write_mean_gradients(holder, quorum, roles, timeout_s)
                break
            except LostReplicaError as error:
                num_retries = num_retries + 1
                timeout_s = self._settings.timeout_s
                log.info(
                    "survive: update %d of replica %s is repeated: %s",
                    *(self.ledger.step, self.name, error),
                )
                self._close_group()
        self.report.num_retries += num_retries
        self._done = window_key
        self._skips_update = False
        has_lost_members = self._commit_update(roles)
        if has_lost_members or num_retries:
            self.report.longest_pause_s = max(
                self.report.longest_pause_s, time.monotonic() - began_s
            )
        return False

    def _meet_members(self, may_stand: bool = False) -> tuple[Quorum, Roles]:
        """Return the members of this update, and their roles; waits until enough replicas are there.

        With `standing`, the members of the previous update make this one, if they have agreed to it.
        """
        standing_members = self._standing
        if self._coordinator is None:
            members_of_update = self._decode_decision(
                standing_members, self._inside.receive_decision()
            )
        else:
            standing = self._take_standing() if may_stand else None
            members_of_update = standing or self._wait_for_quorum(self._coordinator)
            now_s = time.monotonic()
            is_late = (
                now_s - self._met_at_s + 2 * (now_s - self._updated_at_s)
                > _MAX_STANDING_S
            )
            quorum, roles = members_of_update
            if self.duties.asks_to_stop:
                self._next_request = 2
            else:
                self._next_request = int(bool(roles.healing) or is_late)
            decision: dict[str, Any] = {"asks": self._next_request, "quorum": None}
            if members_of_update is not standing_members:
                decision["quorum"] = quorum.to_json()
            self._inside.send_decision(decision)
        self._standing = None
        self._key = members_of_update[0].key
        return members_of_update

    def _decode_decision(
        self, standing_members: tuple[Quorum, Roles] | None, decision: Mapping[str, Any]
    ) -> tuple[Quorum, Roles]:
        """Return the members that the first rank of this replica has decided on."""
        self._next_request = int(decision["asks"])
        if (encoded_quorum := decision["quorum"]) is None:
            assert standing_members is not None, (
                "all ranks of a replica keep the same members"
            )
            return standing_members
        quorum = Quorum.from_json(encoded_quorum)
        return quorum, quorum.roles

    def _wait_for_quorum(self, coordinator: Coordinator) -> tuple[Quorum, Roles]:
        """Return the members that the lighthouse names, when enough replicas are there."""
        began_s = time.monotonic()
        is_reported = False
        while True:
            quorum_future = self._quorum_future or coordinator.ask_for_quorum()
            self._quorum_future = None
            self.report.waiting_since = self._met_at_s = time.monotonic()
            try:
                quorum = coordinator.wait_for_quorum(quorum_future)
            finally:
                self.report.waiting_since = None
            roles = quorum.roles
            self._refuse_to_continue_a_finished_run(roles)
            starts_run = self._fresh and roles.active[0].fresh
            if not starts_run or not (
                unreachable_holders := self._held_by_others(
                    roles, time.monotonic() - began_s
                )
            ):
                return quorum, roles
            if not is_reported:
                log.warning(
                    "survive: replica %s waits: %s hold the run and cannot be reached",
                    self.name,
                    unreachable_holders,
                )
            is_reported = True
            time.sleep(_JOIN_RETRY_S)

    def _take_standing(self) -> tuple[Quorum, Roles] | None:
        """Return the members of the previous update if all of them have agreed to make this one without asking; None if it is too late.

        This only saves time: an update needs the gradients of all of them, and fails if one is away.
        """
        is_late = time.monotonic() - self._met_at_s > self._settings.heartbeat_timeout_s
        return None if is_late else self._standing

    def _note_agreed(self) -> None:
        self._agreed_at = self.ledger.step
        if self.duties.leads and self._inside.is_first:
            agreed_file = self._folder / AGREED_FILE
            draft_file = agreed_file.with_suffix(f".{self.name}")
            draft_file.write_text(self._describe_history())
            draft_file.replace(agreed_file)

    def _describe_history(self) -> str:
        return f"{self.ledger.step} {self.ledger.lineage}"

    def _refuse_to_continue_a_finished_run(self, roles: Roles) -> None:
        """Raise CommError if this replica was away while the others have finished the run."""
        is_complete = len(roles.names) >= self._settings.replicas
        if is_complete or not (self._folder / FINISHED_FILE).exists():
            return
        agreed_file = self._folder / AGREED_FILE
        if agreed_file.exists() and agreed_file.read_text() == self._describe_history():
            return
        raise CommError(
            f"replica {self.name} was away at update {self.ledger.step} while the others finished the run, so the run's result is theirs, and this "
            "replica would use samples again. Nothing has to be done: this replica ends here."
        )

    def _write_mean_gradients(
        self, holder: Holder, quorum: Quorum, roles: Roles, patience_s: float
    ) -> None:
        """Exchange the gradients of the active replicas and write the mean to the parameters, on all ranks of this replica or on none."""
        parameters = [
            parameter for parameter in holder.parameters if parameter.requires_grad
        ]
        weight, weight_share = self._count_weights()
        lost_error: LostReplicaError | None = None
        received_gradients: Received | None = None
        try:
            self._connect_group(quorum, roles)
            if self._group is not None:
                facts = (
                    float(self.ledger.step),
                    float(len(self.ledger.rounds)),
                    float(len(parameters)),
                )
                self._group.timeout_s = patience_s
                received_gradients = self._group.receive_gradients(
                    parameters, weight, weight_share, facts, self._next_request
                )
        except LostReplicaError as error:
            # the frames of the error hold messages, and these the connections
            lost_error = LostReplicaError(*error.args)
        if len(roles.active) > 1 and not self._inside.vote(lost_error is None):
            raise lost_error or LostReplicaError(
                "another rank of this replica has lost a member"
            )
        if received_gradients is None:
            scale_gradients(parameters, weight / weight_share if weight_share else 0.0)
        else:
            received_gradients.write_means()
        if received_gradients is None:
            next_request = self._next_request
        else:
            next_request = received_gradients.request
        self.duties.record_update(roles.contributors, next_request > 1)
        self._standing = None if next_request else (quorum, roles)
        self._updated_at_s = time.monotonic()

    def _connect_group(self, quorum: Quorum, roles: Roles) -> None:
        """Connect this rank to the same rank of the other active replicas, unless it is. Raises: LostReplicaError."""
        member_names = roles.contributors
        if member_names == self.contributors and self._grouped:
            return
        self._close_group()
        if len(member_names) > 1:
            group_key = f"{quorum.key}/{'+'.join(member_names)}/{self._inside.rank}"
            store_address = roles.active[0].store
            timeout_s = self._settings.timeout_s
            self._group = ReplicaGroup(
                store_address,
                group_key,
                member_names.index(self.name),
                len(member_names),
                timeout_s,
            )
        self.contributors = member_names
        self._grouped = True

    def _count_weights(self) -> tuple[float, float]:
        """Return the factor of this replica's gradients, and its share of the sum of weights."""
        num_rounds, num_real = self.ledger.count_batches(self.name, self._inside.size)
        window_weights = self._clock.window_weights()
        if window_weights is None:
            return (float(num_rounds), float(num_real)) if num_rounds else (1.0, 1.0)
        if len(window_weights) > 1:
            raise StepError(
                f"a window has {len(window_weights)} weighted losses in each micro-step, and replicas exchange gradients that have one common weight. "
                "Add the losses before backward()."
            )
        total_weight = self._inside.sum_over_ranks(window_weights[0])
        return total_weight, total_weight

    def _commit_update(self, roles: Roles) -> bool:
        """Record the update that is about to be applied; returns whether samples were given out again."""
        ledger = self.ledger
        present_names = set(roles.contributors)
        absent_names = [name for name in ledger.members if name not in present_names]
        returned_ranges = ledger.commit_update(roles.contributors, roles.names)
        self._note_joined(roles)
        self._to_heal = roles.healed_by(self.name)
        if not absent_names:
            return False
        self.report.lost += [(ledger.step, absent_name) for absent_name in absent_names]
        num_returned = count_positions(returned_ranges)
        self.report.num_returned += num_returned
        words = f"{', '.join(absent_names)} in update {ledger.step}; {len(present_names)} left, {num_returned} samples given out again"
        self.note("replicas lost", words=words)
        log.warning(
            "survive: update %d was made by %d replica(s), without %s; %d samples are given out again",
            *(ledger.step, len(present_names), ", ".join(absent_names), num_returned),
        )
        return True

    def _note_joined(self, roles: Roles) -> list[str]:
        joined_names = [member.name for member, _ in roles.healing]
        self.report.joined += [(self.ledger.step, name) for name in joined_names]
        self.report.num_present = len(roles.names)
        if joined_names:
            words = f"{', '.join(joined_names)} after update {self.ledger.step}; {len(roles.names)} present"
            self.note("replicas joined", words=words)
        return joined_names

    def _close_group(self) -> None:
        self._standing = None
        if self._group is not None:
            self._group.close()
        self._group = None
        self._grouped = False

    # -- healing ---------------------------------------------------------------------------------------------------
    def _join_run(self) -> None:
        """Take part in the run: with the state of a replica that has joined, or at the start with that of the first."""
        if len(self._prepared.optimizers) > 1:
            raise StepError(
                f"{len(self._prepared.optimizers)} optimizers were prepared, and survive exchanges the gradients of one: the steps of several would have to "
                "be applied together or not at all. Put all parameters into groups of one optimizer."
            )
        while self._fresh:
            _, roles = self._meet_members()
            if roles.is_active(self.name):
                self._fresh = False
                self._mark_as_joined()
                self.duties.record_update([self.name])
                self.ledger.members = roles.names
                self._to_heal = roles.healed_by(self.name)
                self._send_state()
            else:
                self._receive_state(roles)

    def _held_by_others(self, roles: Roles, waited_s: float) -> list[str]:
        """Return the live replicas that have joined the run and cannot be reached: a second run must not start beside theirs."""
        if waited_s > self._settings.hang_timeout_s:
            return []
        holder_names = []
        for joined_file in self._folder.glob(f"{JOINED_PREFIX}*"):
            holder_names.append(joined_file.name.removeprefix(JOINED_PREFIX))
        return sorted(set(holder_names) - set(roles.names))

    def _mark_as_joined(self) -> None:
        """Tell later processes of this machine that this one holds the run's state; the launcher undoes it when the process ends."""
        if self._inside.is_first:
            (self._folder / f"{JOINED_PREFIX}{self.name}").touch()

    def _send_state(self) -> None:
        """Send this replica's state to those that have to be healed by it; called between two updates."""
        waiting_members = self._to_heal
        self._to_heal = []
        if not waiting_members:
            return
        state: RunStateDict = {
            "ledger": self.ledger.to_json(),
            "clock": self._clock.num_updates,
            **self.state.collect_state(),
        }
        packed_state = healing.pack_state(state)
        for waiting_member in waiting_members:
            try:
                address = address_of_rank(waiting_member.heal, self._inside.rank)
                healing.send_state(
                    packed_state,
                    address,
                    self._token,
                    self._key,
                    self._settings.timeout_s,
                )
            except OSError as error:
                log.warning(
                    "survive: replica %s could not be healed: %s",
                    waiting_member.name,
                    error,
                )

    def _receive_state(self, roles: Roles, in_step: bool = False) -> bool:
        """Receive the run's state from another replica; returns False if that one was lost, and nothing has changed."""
        source_member = roles.source_of(self.name)
        survive_settings = self._settings
        self._close_group()
        received_state: RunStateDict | None = None
        try:
            address = address_of_rank(source_member.heal, self._inside.rank)
            received_state = self._port.receive(
                address,
                self._key,
                survive_settings.hang_timeout_s,
                survive_settings.timeout_s,
            )
        except NotHealedError as error:
            log.warning(
                "survive: replica %s was not healed by %s: %s",
                self.name,
                source_member.name,
                error,
            )
        if not self._inside.vote(received_state is not None) or received_state is None:
            return False
        self._load_state(received_state, in_step)
        return True

    def _load_state(self, state: RunStateDict, in_step: bool) -> None:
        self.state.load_state(state)
        self.ledger = Ledger.from_json(state["ledger"])
        # the skipped step is counted when it ends
        self._clock.num_updates = state["clock"] - in_step
        self._fresh = False
        self._mark_as_joined()
        self.duties.record_healing()
        self.report.healed.append(self.ledger.step)
        if self._inside.rank:
            rank_seeds = [256 + self._inside.rank]
        else:
            rank_seeds = []
        torch.manual_seed(
            derive_seed(
                self.ledger.seed, self.ledger.step, *self.name.encode(), *rank_seeds
            )
        )
        log.info(
            "survive: replica %s has joined after update %d",
            self.name,
            self.ledger.step,
        )
        self.note(
            "replica healed", words=f"{self.name} after update {self.ledger.step}"
        )

    # -- checkpoints and end ---------------------------------------------------------------------------------------
    follows_data = True
    """The ledger counts the batches of an accumulation window, so a save inside one stores it as of the beginning."""

    def state_dict(self) -> dict[str, Any]:
        """Return the ledger; it is part of every checkpoint."""
        return self.ledger.to_json()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the ledger of a checkpoint."""
        self.ledger = Ledger.from_json(state)
        self.ledger.rounds = []

    def finish_run(self) -> None:
        """Meet the others a last time, so that replicas that are behind are healed, then leave the run."""
        if not self._fresh and self._agreed_at != self.ledger.step and not self.leaves:
            self._meet_at_epoch_end()
        # the first rank serves the others' store until they have come here
        self._inside.vote(True)
        self.close()

    def close(self) -> None:
        """Leave the run and close all connections."""
        if self._coordinator is not None:
            self._coordinator.close()
        self._close_group()
        self._port.close()
        self._inside.close()
