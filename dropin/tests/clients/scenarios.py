"""transformers' Trainer in many ways, each a few steps of a tiny model. Usage: scenarios.py FOLDER OUT.json [name …]"""

import sys
from pathlib import Path

import torch
from outcome import SHORT, history, record, weights
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

LOG_KEYS = (
    "loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "eval_a_loss", "eval_b_loss", "step", "epoch",
    "num_input_tokens_seen",
)  # fmt: skip
TINY = {"vocab_size": 60, "max_position_embeddings": 16}


def rows(size, seed=0, labels=True, lengths=False):
    """Sequences of 8 words, or of 4 to 9 when lengths vary."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for index in range(size):
        ids = torch.randint(
            2, 60, (4 + index % 6 if lengths else 8,), generator=generator
        )
        samples.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        samples[-1]["labels"] = ids.sum() % 2 if labels else ids.clone()
    return samples


class Stream(torch.utils.data.IterableDataset):
    """The rows, one after another."""

    def __iter__(self):
        return iter(rows(22))


def classifier():
    set_seed(3)
    return BertForSequenceClassification(
        BertConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            **TINY,
        )
    )


def writer():
    set_seed(3)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=60,
            n_positions=16,
            n_embd=16,
            n_layer=1,
            n_head=2,
            bos_token_id=0,
            eos_token_id=1,
        )
    )


def translator():
    set_seed(3)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=60,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
        )
    )


def accuracy(prediction):
    logits = (
        prediction.predictions[0]
        if isinstance(prediction.predictions, tuple)
        else prediction.predictions
    )
    return {"accuracy": float((logits.argmax(-1) == prediction.label_ids).mean())}


class BatchAccuracy:
    """Metrics that are fed batch by batch."""

    def __init__(self):
        self.right = self.all = 0

    def __call__(self, prediction, compute_result=False):
        self.right += int(
            (prediction.predictions.argmax(-1) == prediction.label_ids).sum()
        )
        self.all += len(prediction.label_ids)
        if not compute_result:
            return {}
        metrics, self.right, self.all = {"accuracy": self.right / self.all}, 0, 0
        return metrics


class Pad:
    """Fills sequences with zeros to the longest of a batch."""

    def __call__(self, batch):
        longest = max(len(sample["input_ids"]) for sample in batch)
        padded = {
            name: torch.stack(
                [
                    torch.nn.functional.pad(
                        sample[name], (0, longest - len(sample[name]))
                    )
                    for sample in batch
                ]
            )
            for name in ("input_ids", "attention_mask")
        }
        padded["labels"] = torch.stack([sample["labels"] for sample in batch])
        return padded


class Events(TrainerCallback):
    """Counts what it is told."""

    def __init__(self):
        self.seen = {}

    def __getattribute__(self, name):
        if name.startswith("on_"):
            event_counts = object.__getattribute__(self, "seen")
            event_counts[name] = event_counts.get(name, 0) + 1
        return object.__getattribute__(self, name)


class Stop(TrainerCallback):
    """Ends the training after a step, and asks for a save."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = control.should_save = state.global_step == 3


class Weighted(Trainer):
    """A loss of one's own."""

    def compute_loss(
        self, model, inputs, return_outputs=False, num_items_in_batch=None
    ):
        labels = inputs.pop("labels")
        out = model(**inputs)
        loss = torch.nn.functional.cross_entropy(
            out.logits, labels, weight=torch.tensor([1.0, 3.0])
        )
        return (loss, out) if return_outputs else loss


class InOrder(Trainer):
    """Reads the rows in their order."""

    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def trained(
    folder,
    model=None,
    kind=Trainer,
    data=None,
    resume=None,
    extra=None,
    arguments=TrainingArguments,
    **options,
):
    """A short training: its log and the sum of its weights."""
    settings = {
        **SHORT,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        **options,
    }
    extra = dict(extra or {})
    extra.setdefault("eval_dataset", rows(13, 1))
    trainer = kind(
        model=model or classifier(),
        args=arguments(folder, **settings),
        train_dataset=rows(22) if data is None else data,
        **extra,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def told(trainer):
    return {
        "log": history(trainer, *LOG_KEYS),
        "weights": weights(trainer.model.parameters()),
        "steps": trainer.state.global_step,
    }


def simple(**options):
    return lambda folder: told(trained(folder, **options))


def lm(**options):
    return lambda folder: told(
        trained(
            folder,
            model=writer(),
            data=rows(22, labels=False),
            extra={"eval_dataset": rows(9, 1, labels=False)},
            **options,
        )
    )


def saved(folder):
    return sorted(
        path.name
        for path in Path(folder).iterdir()
        if path.name.startswith("checkpoint")
    )


def resumed(folder, step, **options):
    common = {
        "save_strategy": "steps",
        "save_steps": 2,
        "num_train_epochs": 2,
        **options,
    }
    first = trained(folder, **common)
    resumed_trainer = trained(
        folder, resume=str(Path(folder) / f"checkpoint-{step}"), **common
    )
    return [told(first), told(resumed_trainer), saved(folder)]


def best(folder):
    trainer = trained(
        folder, num_train_epochs=3, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
        metric_for_best_model="accuracy", extra={"compute_metrics": accuracy},
    )  # fmt: skip
    return [
        told(trainer),
        trainer.state.best_metric,
        Path(trainer.state.best_model_checkpoint or "none").name,
    ]


def early(folder):
    trainer = trained(
        folder, num_train_epochs=6, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, learning_rate=0.0,
        metric_for_best_model="eval_loss", extra={"callbacks": [EarlyStoppingCallback(early_stopping_patience=1)]},
    )  # fmt: skip
    return [trainer.state.global_step, trainer.state.best_global_step]


def events(folder):
    callback = Events()
    trained(
        folder,
        extra={"callbacks": [callback]},
        eval_strategy="epoch",
        gradient_accumulation_steps=2,
    )
    return dict(sorted(callback.seen.items()))


def own_optimizer(folder):
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    return told(
        trained(folder, model=model, extra={"optimizers": (optimizer, schedule)})
    )


def predicted(folder):
    trainer = trained(
        folder, per_device_eval_batch_size=4, extra={"compute_metrics": accuracy}
    )
    prediction = trainer.predict(rows(13, 1))
    return [
        prediction.predictions.tolist(),
        prediction.label_ids.tolist(),
        prediction.metrics["test_accuracy"],
        prediction.metrics["test_loss"],
    ]


def evaluated(**options):
    def run(folder):
        extra = {"compute_metrics": accuracy, **options.pop("extra", {})}
        trainer = trained(folder, per_device_eval_batch_size=4, extra=extra, **options)
        return {
            name: value
            for name, value in trainer.evaluate().items()
            if name in LOG_KEYS
        }

    return run


def several_sets(folder):
    return told(
        trained(
            folder,
            eval_strategy="epoch",
            extra={"eval_dataset": {"a": rows(5, 1), "b": rows(8, 2)}},
        )
    )


def twice(folder):
    trainer = trained(folder, max_steps=3)
    trainer.train()
    return told(trainer)


def translated(folder):
    data = [
        {"input_ids": row["input_ids"], "labels": row["input_ids"].flip(0)}
        for row in rows(12, labels=False)
    ]
    trainer = trained(
        folder, model=translator(), kind=Seq2SeqTrainer, data=data, arguments=Seq2SeqTrainingArguments,
        predict_with_generate=True, generation_max_length=6, extra={"eval_dataset": data[:5]},
    )  # fmt: skip
    return [told(trainer), trainer.predict(data[:5]).predictions.tolist()]


def searched(folder):
    trainer = trained(folder, auto_find_batch_size=True, per_device_train_batch_size=8)
    return told(trainer)


def lora(folder):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        classifier(),
        LoraConfig(r=2, target_modules=["query", "value"], lora_dropout=0.0),
    )
    trainer = trained(folder, model=model, save_strategy="epoch")
    return [told(trainer), saved(folder)]


def from_columns(folder):
    from datasets import Dataset

    records = [
        {**{name: value.tolist() for name, value in row.items()}, "unused": "x"}
        for row in rows(22)
    ]
    return told(trained(folder, data=Dataset.from_list(records)))


def accelerator_config(**options):
    return simple(accelerator_config=options)


def limited(folder):
    trained(folder, save_strategy="steps", save_steps=1, save_total_limit=2)
    return saved(folder)


def stopped(folder):
    trainer = trained(folder, num_train_epochs=3, extra={"callbacks": [Stop()]})
    return [told(trainer), saved(folder)]


def inherited_state(folder):
    trained(folder, save_strategy="steps", save_steps=3)
    return sorted(
        path.name
        for path in (Path(folder) / saved(folder)[0]).iterdir()
        if path.suffix not in (".json", ".pth", ".pkl")
    )


SCENARIOS = {
    "plain": simple(),
    "accumulated": simple(gradient_accumulation_steps=2),
    "accumulated_unevenly": simple(gradient_accumulation_steps=4, num_train_epochs=2),
    "max_steps": simple(max_steps=4),
    "epochs_in_part": simple(num_train_epochs=1.5),
    "warmup": simple(warmup_steps=3),
    "cosine": simple(lr_scheduler_type="cosine"),
    "constant": simple(lr_scheduler_type="constant"),
    "constant_with_warmup": simple(
        lr_scheduler_type="constant_with_warmup", warmup_steps=2
    ),
    "polynomial": simple(
        lr_scheduler_type="polynomial", lr_scheduler_kwargs={"power": 2.0}
    ),
    "inverse_sqrt": simple(lr_scheduler_type="inverse_sqrt", warmup_steps=2),
    "cosine_restarts": simple(
        lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 2}
    ),
    "cosine_min": simple(
        lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 1e-3}
    ),
    "plateau": simple(
        lr_scheduler_type="reduce_lr_on_plateau",
        eval_strategy="epoch",
        metric_for_best_model="eval_loss",
        num_train_epochs=2,
    ),
    "weight_decay": simple(weight_decay=0.1),
    "clipped": simple(max_grad_norm=0.1),
    "unclipped": simple(max_grad_norm=0.0),
    "clipped_in_windows": simple(max_grad_norm=0.1, gradient_accumulation_steps=2),
    "label_smoothing": simple(label_smoothing_factor=0.1),
    "by_length": simple(
        train_sampling_strategy="group_by_length",
        data=rows(22, lengths=True),
        extra={"data_collator": Pad()},
    ),
    "sequential": simple(train_sampling_strategy="sequential"),
    "in_order": simple(kind=InOrder),
    "bf16": simple(bf16=True),
    "bf16_accumulated": simple(bf16=True, gradient_accumulation_steps=2),
    "bf16_evaluated": evaluated(bf16_full_eval=True),
    "drop_last": simple(dataloader_drop_last=True),
    "dispatched": accelerator_config(dispatch_batches=True),
    "split": accelerator_config(split_batches=True),
    "split_and_dispatched": accelerator_config(
        split_batches=True, dispatch_batches=True
    ),
    "uneven": accelerator_config(even_batches=False),
    "torch_sampler": accelerator_config(use_seedable_sampler=False),
    "synced_each": simple(
        gradient_accumulation_steps=2,
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    ),
    "stream": lambda folder: told(trained(folder, data=Stream(), max_steps=5)),
    "stream_read_by_each": lambda folder: told(
        trained(
            folder,
            data=Stream(),
            max_steps=5,
            accelerator_config={"dispatch_batches": False},
        )
    ),
    "stream_accumulated": lambda folder: told(
        trained(folder, data=Stream(), max_steps=3, gradient_accumulation_steps=2)
    ),
    "evaluated": evaluated(),
    "evaluated_in_parts": evaluated(eval_accumulation_steps=1),
    "evaluated_by_batch": lambda folder: {
        name: value
        for name, value in trained(
            folder,
            per_device_eval_batch_size=4,
            batch_eval_metrics=True,
            extra={"compute_metrics": BatchAccuracy()},
        )
        .evaluate()
        .items()
        if name in LOG_KEYS
    },
    "loss_only": evaluated(prediction_loss_only=True),
    "logits_preprocessed": evaluated(
        extra={"preprocess_logits_for_metrics": lambda logits, labels: logits * -1}
    ),
    "evaluated_each_step": simple(eval_strategy="steps", eval_steps=2),
    "evaluated_first": simple(eval_strategy="epoch", eval_on_start=True),
    "evaluated_late": simple(eval_strategy="epoch", eval_delay=2, num_train_epochs=3),
    "several_sets": several_sets,
    "predicted": predicted,
    "best": best,
    "early": early,
    "stopped": stopped,
    "events": events,
    "limited": limited,
    "files": inherited_state,
    "resumed": lambda folder: resumed(folder, 4),
    "resumed_inside_epoch": lambda folder: resumed(
        folder, 2, gradient_accumulation_steps=2
    ),
    "resumed_without_skip": lambda folder: resumed(folder, 2, ignore_data_skip=True),
    "resumed_bf16": lambda folder: resumed(folder, 4, bf16=True),
    "only_model": lambda folder: [
        told(trained(folder, save_strategy="epoch", save_only_model=True)),
        saved(folder),
    ],
    "own_optimizer": own_optimizer,
    "own_loss": simple(kind=Weighted),
    "own_loss_accumulated": simple(kind=Weighted, gradient_accumulation_steps=2),
    "loss_function": simple(
        extra={
            "compute_loss_func": lambda out, labels, num_items_in_batch=None: (
                torch.nn.functional.cross_entropy(out.logits, labels)
            )
        }
    ),
    "sgd": simple(optim="sgd"),
    "adafactor": simple(optim="adafactor", learning_rate=1e-3),
    "adagrad": simple(optim="adagrad"),
    "rmsprop": simple(optim="rmsprop", learning_rate=1e-3),
    "betas": simple(adam_beta1=0.5, adam_beta2=0.9, adam_epsilon=1e-4),
    "recomputed": simple(gradient_checkpointing=True),
    "compiled": simple(torch_compile=True, torch_compile_backend="eager"),
    "noise": lm(neftune_noise_alpha=5.0),
    "writer": lm(),
    "writer_accumulated": lm(gradient_accumulation_steps=2),
    "writer_local_tokens": lm(average_tokens_across_devices=False),
    "writer_bf16": lm(bf16=True),
    "translated": translated,
    "searched": searched,
    "lora": lora,
    "columns": from_columns,
    "tokens_counted": lm(include_num_input_tokens_seen="all"),
    "data_seed": simple(data_seed=11),
    "other_seed": simple(seed=11),
    "deterministic": simple(full_determinism=False, tf32=False),
    "twice": twice,
    "logged_first": simple(logging_first_step=True, logging_steps=3),
    "logged_by_epoch": simple(logging_strategy="epoch", num_train_epochs=2),
    "one_row": simple(per_device_train_batch_size=1, max_steps=4),
    "larger_batch": simple(per_device_train_batch_size=16),
    "cache_emptied": simple(torch_empty_cache_steps=2),
}


def main(folder):
    scenario_names = sys.argv[3:] or list(SCENARIOS)
    results = {}
    for name in scenario_names:
        sys.stderr.write(f"{name}\n")
        try:
            results[name] = SCENARIOS[name](str(Path(folder) / name))
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    return results


if __name__ == "__main__":
    record(main)
