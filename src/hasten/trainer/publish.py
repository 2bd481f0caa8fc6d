"""Saving a trained model as others load it, and uploading it to the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.checkpoint.store.occupied import check_no_weights
from hasten.checkpoint.store.paths import check_local
from hasten.comm.agreement import agree
from hasten.config.masking import masked_tree
from hasten.errors import ConfigError
from hasten.optional import need

if TYPE_CHECKING:
    from hasten.trainer.trainer import Trainer


def save_model(trainer: Trainer, folder: str) -> str:
    """Write weights, configuration, tokenizer and arguments. Ranks: every rank."""
    accelerator = trainer.accelerator
    model = trainer.model_for_evaluation()
    inner: Any = accelerator.unwrap_model(model)  # Any: models with save_pretrained share no base class here
    if not hasattr(inner, "save_pretrained"):
        accelerator.save_model(model, folder)
    else:
        weights = accelerator.get_state_dict(model)
        with agree(accelerator.comm, "save_model"):
            if accelerator.is_main_process:
                check_no_weights(check_local(folder, "save_model(output_dir)"))
                inner.save_pretrained(folder, state_dict=weights)
    with agree(accelerator.comm, "save_model: tokenizer and arguments"):
        if accelerator.is_main_process:
            if hasattr(trainer.processing_class, "save_pretrained"):
                trainer.processing_class.save_pretrained(folder)
            text = json.dumps(masked_tree(trainer.args.to_dict()), indent=2, default=str)
            Path(folder, "training_args.json").write_text(text + "\n", encoding="utf-8")
    return folder


def push_to_hub(trainer: Trainer, commit_message: str, **options: Any) -> str | None:  # Any: the Hub client's own
    """Save the model and upload its folder; the address of the commit on the main process, None on the others.

    Ranks: every rank. Raises: ConfigError without a name for the repository.
    """
    args, accelerator = trainer.args, trainer.accelerator
    name = args.hub_model_id or Path(args.output_dir).name
    if not name:
        raise ConfigError(f"output_dir={args.output_dir!r} gives no name for the repository; set hub_model_id.")
    folder = save_model(trainer, args.output_dir)
    address: str | None = None
    with agree(accelerator.comm, "push_to_hub"):
        if accelerator.is_main_process:
            client = need("huggingface_hub", ">=0.30", why="push_to_hub").HfApi(token=args.hub_token)
            repository = client.create_repo(name, private=args.hub_private_repo, exist_ok=True).repo_id
            address = str(
                client.upload_folder(
                    repo_id=repository,
                    folder_path=folder,
                    commit_message=commit_message,
                    ignore_patterns=["checkpoints/*", "run_log/*", f"{args.run_name or 'trainer'}/*", ".*"],
                    **options,
                )
            )
    return address
