"""The training loop of a Trainer: a plain loop on the Accelerator, with events for callbacks."""

from __future__ import annotations

import math
import time
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from hasten.extensions.trainer.checkpoints import load_best, note_best, save_checkpoint
from hasten.extensions.trainer.evaluation import slowest_rank_s
from hasten.extensions.trainer.interface import TrainerInterface
from hasten.extensions.trainer.step_plan import TrainingPlan
from hasten.runtime.mesh_plan import BATCH
from hasten.state.preemption import PREEMPTED_EXIT_CODE

_SUMMED_AT_ONCE: Final = 64


class TrainOutput(NamedTuple):
    """Result of `train`."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class TrainingLoop:
    """One training from its first step, or the step of a checkpoint, to its end."""

    def __init__(self, trainer: TrainerInterface, plan: TrainingPlan) -> None:
        self._trainer = trainer
        self._plan = plan
        self._losses: list[tuple[Tensor, Tensor | None]] = []
        """Losses and weights of the latest batches on this rank, as tensors, so that no step synchronises with the device."""
        self._sums: list[Tensor] = []
        """Sums of loss times weight and of weights over earlier batches that were not yet reduced over the ranks."""
        # Any: the norm of the latest update's gradients, a tensor on the device or None
        self._gradient_norm: Any = None
        self._learning_rate: Any = (
            # Any: the learning rate of the latest update, which capturable optimizers store as a tensor
            0.0
        )
        self._begins_window = True
        """True if the next batch is the first of an accumulation window."""
        self._start_s = time.perf_counter()
        self._start_step = trainer.state.global_step
        self._start_epoch = trainer.state.epoch

    def run(self, resumed: bool) -> TrainOutput:
        """Train to the end. Ranks: every rank."""
        trainer = self._trainer
        state = self._trainer.state
        control = self._trainer.control
        self._count_updates(resumed)
        trainer.callbacks.call("on_train_begin")
        if state.evaluation_due:
            state.evaluation_due = False
            self._evaluate_model()
        while not self._is_complete() and not control.should_training_stop:
            control.should_epoch_stop = False
            trainer.callbacks.call("on_epoch_begin")
            is_complete = self._train_epoch()
            if control.should_epoch_stop and not is_complete:
                trainer.train_loader.set_epoch(trainer.train_loader.epoch + 1)
            self._end_epoch(is_complete or control.should_epoch_stop)
        return self._finish_training()

    def _count_updates(self, loaded: bool) -> None:
        """Set the number of updates at the end, and after a load the loaded epoch's batches, for this number of processes."""
        state = self._trainer.state
        plan = self._plan
        state.max_steps = plan.max_steps
        state.num_train_epochs = plan.num_epochs
        if plan.last_epoch_batches is None:
            return
        if loaded and state.batches_in_epoch:
            state.batches_in_epoch = self._trainer.train_loader.num_done
        num_left = plan.num_updates_left(state.epochs_done, state.batches_in_epoch)
        state.max_steps = state.global_step + num_left

    def _is_complete(self) -> bool:
        """Return whether all updates were made."""
        state = self._trainer.state
        plan = self._plan
        return plan.is_complete(
            state.global_step, state.epochs_done, state.batches_in_epoch
        )

    def _leaves_epoch(self) -> bool:
        """Return whether to leave the epoch now; after its last batch it ends by itself."""
        state = self._trainer.state
        control = self._trainer.control
        num_batches = self._plan.batches_per_epoch
        if num_batches is not None and state.batches_in_epoch >= num_batches:
            return False
        return (
            control.should_training_stop
            or control.should_epoch_stop
            or self._is_complete()
        )

    def _train_epoch(self) -> bool:
        """Train on the batches of an epoch, or on the rest of it after a resume; return whether its end was reached."""
        trainer = self._trainer
        state = self._trainer.state
        self._begins_window = (
            trainer.accelerator.sync_gradients or state.global_step == 0
        )
        trainer.wrapped_model.train()
        for batch in trainer.train_loader:
            self._train_on(batch)
            state.batches_in_epoch += 1
            if not self._begins_window:
                # requests of callbacks wait for the window's end
                trainer.callbacks.call("on_substep_end")
                continue
            self._end_step()
            if self._leaves_epoch():
                return False
        return True

    def _train_on(self, batch: Any) -> None:  # Any: a batch of the user's
        """Run forward and backward on a batch, and at the end of a window the update."""
        trainer = self._trainer
        accelerator = self._trainer.accelerator
        model = trainer.wrapped_model
        optimizer = trainer.optimizer
        call_event = trainer.callbacks.call
        max_norm = trainer.args.max_grad_norm
        if self._begins_window:
            call_event("on_step_begin")
        with accelerator.accumulate(model):
            self._add_loss(*trainer.training_step(model, batch))
            if max_norm:
                gradient_norm = accelerator.clip_grad_norm_(
                    model.parameters(), max_norm
                )
                if gradient_norm is None:
                    self._gradient_norm = self._gradient_norm
                else:
                    self._gradient_norm = gradient_norm
            if accelerator.sync_gradients:
                call_event("on_pre_optimizer_step")
            optimizer.step()
            if accelerator.sync_gradients:
                self._learning_rate = optimizer.param_groups[0]["lr"]
                call_event("on_optimizer_step")
            trainer.lr_scheduler.step()
            optimizer.zero_grad()
        self._begins_window = accelerator.sync_gradients

    def _add_loss(self, loss: Tensor, weight: Tensor | None) -> None:
        """Store a batch's loss for the next log; losses are summed in groups, since each sum costs time."""
        self._losses.append((loss.detach(), weight))
        if len(self._losses) >= _SUMMED_AT_ONCE:
            self._sum_losses()

    def _sum_losses(self) -> None:
        """Sum the stored losses."""
        device = self._losses[0][0].device
        losses = torch.stack([loss for loss, _ in self._losses]).double()
        unit_weight = torch.ones((), device=device)
        batch_weights = []
        for _, weight in self._losses:
            batch_weights.append(unit_weight if weight is None else weight.to(device))
        weights = torch.stack(batch_weights).double()
        # the mean over no labels is nan, and so is nan * 0
        counted_losses = torch.where(weights == 0, 0.0, losses)
        self._sums.append(
            torch.stack([(counted_losses * weights).sum(), weights.sum()])
        )
        self._losses.clear()

    def _end_step(self) -> None:
        """Count an update, then log, evaluate and save if due."""
        trainer = self._trainer
        state = self._trainer.state
        control = self._trainer.control
        plan = self._plan
        args = trainer.args
        state.global_step += 1
        self._set_epoch()
        update_number = state.global_step
        is_last = self._is_complete()
        if plan.due(args.logging_strategy, plan.logging_steps, update_number) or (
            args.logging_first_step and update_number == 1
        ):
            control.should_log = True
        if plan.due(args.eval_strategy, plan.eval_steps, update_number):
            control.should_evaluate = True
        if plan.due(args.save_strategy, plan.save_steps, update_number) or (
            is_last and args.save_strategy == "steps"
        ):
            control.should_save = True
        trainer.callbacks.call("on_step_end")
        stopping = trainer.accelerator.preempted
        self._act_on_requests(stopping)
        if stopping:
            control.stop_reason = "after a signal; a checkpoint was saved"
            trainer.callbacks.call("on_train_end")
            trainer.accelerator.end_training()
            raise SystemExit(PREEMPTED_EXIT_CODE)

    def _end_epoch(self, over: bool) -> None:
        """Log, evaluate and save if due after an epoch, and count it unless a resume would continue it."""
        trainer = self._trainer
        state = self._trainer.state
        control = self._trainer.control
        args = self._trainer.args
        if over:
            state.epochs_done += 1
            state.batches_in_epoch = 0
            self._set_epoch()
        control.should_log |= args.logging_strategy == "epoch"
        control.should_evaluate |= args.eval_strategy == "epoch"
        control.should_save |= args.save_strategy == "epoch"
        trainer.callbacks.call("on_epoch_end")
        self._act_on_requests()

    def _set_epoch(self) -> None:
        state = self._trainer.state
        num_batches = self._plan.batches_per_epoch
        epoch_share = 0.0
        if num_batches:
            epoch_share = min(1.0, state.batches_in_epoch / num_batches)
        state.epoch = state.epochs_done + epoch_share

    def _act_on_requests(self, stopping: bool = False) -> None:
        """Log, evaluate and save, as the control requests."""
        control = self._trainer.control
        if control.should_log:
            control.should_log = False
            self.log_training()
        metrics: dict[str, float] = {}
        if control.should_evaluate:
            control.should_evaluate = False
            if stopping:  # little time may be left, so it is done after the resume
                self._trainer.state.evaluation_due = True
            else:
                metrics = self._evaluate_model()
        if control.should_save or stopping:
            control.should_save = False
            self.add_up()
            save_checkpoint(self._trainer, metrics)

    def _evaluate_model(self) -> dict[str, float]:
        trainer = self._trainer
        metrics = trainer.evaluate()
        if note_best(trainer, metrics) and trainer.args.save_strategy == "best":
            trainer.control.should_save = True
        return metrics

    # -- logging ------------------------------------------------------------------------------------------------
    def add_up(self) -> None:
        """Reduce the losses since the last call over all ranks and add them to the state. Ranks: every rank."""
        state = self._trainer.state
        accelerator = self._trainer.accelerator
        if self._losses:
            self._sum_losses()
        if not self._sums:
            return
        sums = torch.stack(self._sums).sum(0).cpu()
        loss, weight = accelerator.reduce(sums, "sum", axes=BATCH).tolist()
        self._sums.clear()
        state.loss_sum = state.loss_sum + loss
        state.loss_weight = state.loss_weight + weight
        state.total_loss = state.total_loss + loss
        state.total_weight = state.total_weight + weight

    def log_training(self) -> None:
        """Log the mean loss since the last log, the learning rate and the norm of the gradients. Ranks: every rank."""
        trainer = self._trainer
        state = self._trainer.state
        self.add_up()
        if not state.loss_weight:
            return
        logs: dict[str, float] = {"loss": state.loss_sum / state.loss_weight}
        if self._gradient_norm is not None:
            logs["grad_norm"] = float(self._gradient_norm)
        logs["learning_rate"] = float(self._learning_rate)
        state.loss_sum = state.loss_weight = 0.0
        trainer.log(logs)

    def _finish_training(self) -> TrainOutput:
        trainer = self._trainer
        state = self._trainer.state
        self.add_up()
        elapsed_s = slowest_rank_s(
            trainer.accelerator, time.perf_counter() - self._start_s
        )
        num_updates = state.global_step - self._start_step
        if state.total_weight:
            mean_loss = state.total_loss / state.total_weight
        else:
            mean_loss = math.nan
        metrics = {
            "train_runtime": round(elapsed_s, 4),
            "train_steps_per_second": round(num_updates / elapsed_s, 3),
        }
        if (
            self._plan.batches_per_epoch is not None
            and trainer.train_loader.total_batch_size is not None
        ):
            num_samples = (
                state.epoch - self._start_epoch
            ) * trainer.train_loader.total_dataset_length
            metrics["train_samples_per_second"] = round(num_samples / elapsed_s, 3)
        metrics |= {"train_loss": mean_loss, "epoch": state.epoch}
        trainer.log(dict(metrics))
        if trainer.args.load_best_model_at_end:
            load_best(trainer)
        trainer.callbacks.call("on_train_end")
        return TrainOutput(state.global_step, mean_loss, metrics)
