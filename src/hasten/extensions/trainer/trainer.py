"""The Trainer: train, evaluate, predict, save and publish a model without writing a loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from hasten.accelerator.components import components
from hasten.accelerator.facade import Accelerator
from hasten.data.loader import Loader
from hasten.errors import ArgumentError, ConfigError
from hasten.extensions.trainer import checkpoints
from hasten.extensions.trainer.arguments import (
    TrainingArguments,
    check_given_optimizers,
)
from hasten.extensions.trainer.callbacks import (
    CallbackList,
    ProgressCallback,
    TrainerCallback,
)
from hasten.extensions.trainer.collate import (
    LABELS,
    CollateUsed,
    DataCollatorWithPadding,
    default_data_collator,
    taken_by,
    without_unused,
)
from hasten.extensions.trainer.evaluation import (
    ComputeMetrics,
    PredictionOutput,
    run_evaluation,
)
from hasten.extensions.trainer.loop import TrainingLoop, TrainOutput
from hasten.extensions.trainer.loss import (
    labels_in,
    loss_in,
    num_items,
    run_model,
    shifts_labels,
)
from hasten.extensions.trainer.schedules import (
    get_scheduler,
    make_optimizer,
    num_warmup_steps,
)
from hasten.extensions.trainer.settings import accelerator_settings
from hasten.extensions.trainer.state import TrainerControl, TrainerState
from hasten.extensions.trainer.step_plan import TrainingPlan, plan_training
from hasten.runtime.seeding import set_seed

# Any in this file: datasets, batches, outputs and tokenizers of any type.


class Trainer:
    """Trainer of a model that returns its loss, on any number of processes.

    ```python
    trainer = Trainer(model, TrainingArguments("out"), train_dataset=train, eval_dataset=test, processing_class=tokenizer)
    trainer.train()
    ```
    It is built on the Accelerator, so every precision and every strategy works here too.
    Ranks: every rank creates one and calls its methods.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: ComputeMetrics | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Optimizer | None, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ArgumentError(
                f"Trainer(model) got a {type(model).__qualname__}, which has no weights to train; give a torch.nn.Module."
            )
        self.args = args = args or TrainingArguments("trainer_output")
        check_given_optimizers(args, *optimizers)
        self.model = model
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.processing_class = processing_class
        self.compute_metrics = compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.data_collator = data_collator or self._default_collator()
        self.label_names: list[str] = list(args.label_names or LABELS)
        self.shifted = shifts_labels(model)
        enable_recomputation: Any = getattr(
            model, "gradient_checkpointing_enable", None
        )
        if args.gradient_checkpointing and enable_recomputation is not None:
            enable_recomputation({"use_reentrant": False})
        self.accelerator = self._make_accelerator()
        self.state = TrainerState(
            is_world_process_zero=self.accelerator.is_main_process,
            is_local_process_zero=self.accelerator.is_local_main_process,
        )
        self.control = TrainerControl()
        self.optimizer: Any = optimizers[0]
        self.lr_scheduler: Any = optimizers[1]
        self.wrapped_model: Any = None
        self._evaluated_model: nn.Module | None = None
        self.train_loader: Any = None
        self._tracking = False
        self.accelerator.register_for_checkpointing(self.state)
        own_callbacks: list[Any] = [] if args.disable_tqdm else [ProgressCallback()]
        self.callbacks = CallbackList(self, [*own_callbacks, *(callbacks or ())])
        self.callbacks.call("on_init_end")

    def _make_accelerator(self) -> Accelerator:
        accelerator = Accelerator(**accelerator_settings(self.args, self.model))
        if "replica" in components(accelerator).clock.parts.read_status():
            raise ConfigError(
                "the Trainer does not run in replicas that may be lost, each of which would count steps and epochs separately. Write the "
                "loop with the Accelerator (docs/survive.md), or launch without --replicas."
            )
        if accelerator.config.checkpoint_in_memory is not None:
            raise ConfigError(
                f"checkpoint_in_memory={accelerator.config.checkpoint_in_memory} is not supported by the Trainer, whose state (sums of losses, "
                "callbacks) is only complete when it saves. Remove it, and set save_steps."
            )
        return accelerator

    # -- callbacks ------------------------------------------------------------------------------------------------
    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback, given as an object or as its class."""
        self.callbacks.add(callback)

    def event_keywords(self) -> dict[str, Any]:
        """Return the keywords of every event besides the arguments, the state and the control."""
        return {
            "model": self.model,
            "processing_class": self.processing_class,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            "train_dataloader": self.train_loader,
            "accelerator": self.accelerator,
        }

    # -- data -----------------------------------------------------------------------------------------------------
    def _default_collator(self) -> Callable[[list[Any]], Any]:
        if getattr(self.processing_class, "pad_token_id", None) is None:
            return default_data_collator
        return DataCollatorWithPadding(self.processing_class)

    def _make_loader(
        self, dataset: Any, collate: Callable[[list[Any]], Any], **loader_options: Any
    ) -> DataLoader[Any]:
        args = self.args
        if args.remove_unused_columns:
            argument_names = taken_by(self.model, self.label_names)
            dataset = without_unused(dataset, argument_names)
            if argument_names is not None:
                collate = CollateUsed(collate, argument_names)
        if args.dataloader_num_workers:
            loader_options["persistent_workers"] = args.dataloader_persistent_workers
            loader_options["prefetch_factor"] = args.dataloader_prefetch_factor
        return DataLoader(
            dataset,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            **loader_options,
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the loader of the training data before it is prepared. Override it to read data differently."""
        if self.train_dataset is None:
            raise ArgumentError(
                "train() needs a train_dataset, but the Trainer was created without one; pass train_dataset=."
            )
        args = self.args
        dataset = self.train_dataset
        loader_options: dict[str, Any] = {
            "drop_last": args.dataloader_drop_last,
            "batch_size": args.per_device_train_batch_size,
        }
        if not isinstance(dataset, IterableDataset):
            loader_options["shuffle"] = True
        return self._make_loader(dataset, self.data_collator, **loader_options)

    def get_eval_dataloader(self, dataset: Any) -> DataLoader[Any]:
        """Return the loader of an evaluation or prediction dataset before it is prepared."""
        return self._make_loader(
            dataset, self.data_collator, batch_size=self.args.per_device_eval_batch_size
        )

    def _prepared_eval_loader(self, dataset: Any) -> Loader:
        loader = self.accelerator.prepare_data_loader(self.get_eval_dataloader(dataset))
        components(self.accelerator).prepared.loaders.remove(
            loader
        )  # always read as a whole: checkpoints need no position in it
        return loader

    # -- training -------------------------------------------------------------------------------------------------
    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train, optionally from a checkpoint: its path, True for the newest, "auto" for the newest if there is one.

        Ranks: every rank. Raises: SystemExit with PREEMPTED_EXIT_CODE after saving, on SIGTERM or SIGUSR1.
        """
        if resume_from_checkpoint is None:
            resume = self.args.resume_from_checkpoint
        else:
            resume = resume_from_checkpoint
        self.control = TrainerControl()
        if self.wrapped_model is None:
            plan = self._prepare_training()
        else:  # a second call continues the training
            plan = self._plan_training(self.train_loader)
        if not self._tracking:
            self.accelerator.init_trackers(
                self.args.run_name or "trainer", config=self.args.to_dict()
            )
            self._tracking = True
        if resume:
            checkpoints.load_checkpoint(self, resume)
        try:
            output = TrainingLoop(self, plan).run(resumed=bool(resume))
        except BaseException:
            components(self.accelerator).preemption.end()
            components(self.accelerator).saving.close()
            components(self.accelerator).tracking.finish(failed=True)
            self._tracking = False
            raise
        self.accelerator.end_training()
        self._tracking = False
        return output

    def _plan_training(self, loader: Loader) -> TrainingPlan:
        try:
            num_batches: int | None = len(loader)
        except TypeError:  # an iterable dataset
            num_batches = None
        return plan_training(
            self.args, num_batches, self.accelerator.gradient_accumulation_steps
        )

    def _prepare_training(self) -> TrainingPlan:
        """Prepare loader, model, optimizer and schedule. Ranks: every rank."""
        accelerator = self.accelerator
        args = self.args
        set_seed(
            args.seed,
            device_specific=True,
            deterministic=args.full_determinism,
            rank=accelerator.process_index,
        )
        self.train_loader = accelerator.prepare_data_loader(self.get_train_dataloader())
        plan = self._plan_training(self.train_loader)
        components(accelerator).right_lengths.add(plan.max_steps)
        self.create_optimizer_and_scheduler(plan.max_steps)
        self.wrapped_model, self.optimizer, self.lr_scheduler = accelerator.prepare(
            self.model, self.optimizer, self.lr_scheduler
        )
        return plan

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Create the optimizer and the scheduler unless they were passed. Override it to use others."""
        if self.optimizer is None:
            self.optimizer = make_optimizer(self.args, self.model)
        if self.lr_scheduler is None:
            warmup_steps = num_warmup_steps(self.args, num_training_steps)
            self.lr_scheduler = get_scheduler(
                self.args.lr_scheduler_type,
                self.optimizer,
                warmup_steps,
                num_training_steps,
                self.args.lr_scheduler_kwargs,
            )

    def training_step(
        self, model: nn.Module, inputs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Run forward and backward on one batch; returns its loss, and the number of labels it averages."""
        labels = labels_in(inputs, self.label_names)
        weight = num_items(labels, self.shifted)
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss, weight=weight)
        return loss, weight

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False
    ) -> Any:
        """Return the loss of a batch, a mean over its labels; with `return_outputs` also the model's output. May be overridden."""
        outputs = run_model(model, inputs)
        is_unlabelled = (
            isinstance(inputs, Mapping) and labels_in(inputs, self.label_names) is None
        )
        loss = loss_in(outputs, is_unlabelled)
        return (loss, outputs) if return_outputs else loss

    # -- evaluation -----------------------------------------------------------------------------------------------
    def model_for_evaluation(self) -> nn.Module:
        """Return the prepared model: the trained one, or before a training one prepared for evaluation only."""
        if self.wrapped_model is not None:
            wrapped: nn.Module = self.wrapped_model
            return wrapped
        if self._evaluated_model is None:
            self._evaluated_model = self.accelerator.prepare_model(
                self.model, evaluation_mode=True
            )
            # it is not saved in checkpoints
            components(self.accelerator).prepared.models.remove(self._evaluated_model)
        return self._evaluated_model

    def evaluate(
        self, eval_dataset: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the loss and metrics on a dataset, or on each dataset of a dict. Ranks: every rank.

        The loss is the mean over all labels, independent of batches and processes; `compute_metrics` sees every sample once.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ArgumentError(
                "evaluate() needs an eval_dataset, but the Trainer was created without one; pass eval_dataset=."
            )
        if isinstance(dataset, dict):
            metrics: dict[str, float] = {}
            for dataset_name, named_dataset in dataset.items():
                metrics |= self.evaluate(
                    named_dataset, f"{metric_key_prefix}_{dataset_name}"
                )
            return metrics
        loss_only = self.compute_metrics is None
        metrics = run_evaluation(
            self, self._prepared_eval_loader(dataset), metric_key_prefix, loss_only
        ).metrics
        self.log(metrics)
        self.callbacks.call("on_evaluate", metrics=metrics)
        return metrics

    def predict(
        self, test_dataset: Any, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Return predictions for a dataset in its order, with its labels and metrics if it has labels. Ranks: every rank."""
        output = run_evaluation(
            self,
            self._prepared_eval_loader(test_dataset),
            metric_key_prefix,
            loss_only=False,
        )
        self.callbacks.call("on_predict", metrics=output.metrics)
        return output

    def log(self, logs: dict[str, Any]) -> None:
        """Log values to the trackers and add them to the state's history. Ranks: every rank."""
        state = self.state
        logs = {**logs, "epoch": round(state.epoch, 4)}
        state.log_history.append({**logs, "step": state.global_step})
        if self._tracking:
            self.accelerator.log(logs, step=state.global_step)
        self.callbacks.call("on_log", logs=logs)

    # -- saving ---------------------------------------------------------------------------------------------------
    def save_model(self, output_dir: str | None = None) -> str:
        """Write the model, its tokenizer and the arguments to a folder and return its path. Ranks: every rank."""
        return checkpoints.save_model(self, output_dir or self.args.output_dir)

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.accelerator.device
