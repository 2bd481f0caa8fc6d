"""Differences that dropin/DIFFERENCES.md lists, recognised by what was observed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "DIFFERENCES.md"


@dataclass(frozen=True)
class Listed:
    """A line of the page, and patterns of the observation and of what each package showed."""

    line: str
    """Words of the line."""
    where: str
    original: str = ""
    dropin: str = ""
    test: Callable[[Any, Any], bool] | None = None

    def covers(self, where: str, original: Any, dropin: Any) -> bool:
        texts = [
            value if isinstance(value, str) else json.dumps(value)
            for value in (original, dropin)
        ]
        patterns = re.search(self.original, texts[0]) and re.search(
            self.dropin, texts[1]
        )
        tested = self.test is None or self.test(original, dropin)
        return bool(re.search(self.where, where) and patterns and tested)


def _with_a_manifest(original: Any, dropin: Any) -> bool:
    """The same files, and a manifest.json."""
    lists = isinstance(original, list) and isinstance(dropin, list)
    return lists and original == [
        name for name in dropin if Path(str(name)).name != "manifest.json"
    ]


def _no_dat(original: Any, dropin: Any) -> bool:
    """Files of which none is one of the original's kind."""
    return isinstance(dropin, list) and not any(
        str(name).endswith(".dat") for name in dropin
    )


def _fewer(original: Any, dropin: Any) -> bool:
    """A part of the original's names."""
    return (
        isinstance(original, list)
        and isinstance(dropin, list)
        and set(map(str, dropin)) < set(map(str, original))
    )


def _greater(original: Any, dropin: Any) -> bool:
    """More rows had been read."""
    return isinstance(original, int) and isinstance(dropin, int) and dropin > original


IN_PLACE = "are compiled in place: `prepare` returns the model itself"
ON_THE_HOST = "rest as tensors on the host, or as views of the mapped file, instead of on the meta device"
FILES = "there are no `.dat` files"
RESTING_WEIGHTS = "reach the weights at rest"
PREPARED_TWICE = "can be prepared, and dispatched again to another map"
STREAMED = "They are streamed block by block (hasten's own forward), and `_hf_hook` only shows that"
SCALES = "`accelerator.scaler` is hasten's subclass of torch's `GradScaler`"
BY_NAME = "is kept by the names of parameters, in `param_groups`, too, instead of their numbers"
SHARDS_OF_HASTEN = (
    "hold hasten's safetensors and a `manifest.json` instead of torch's `.distcp` files"
)
AS_TOLD = "**What `launch` was told** counts on one device as well"
NO_GROUP = "the one process that `torchrun` started is `NO`, without DDP"
BIG = r"^(dispatch|offload|loading|loading 2|clients|hooks): "
LISTED: tuple[Listed, ...] = (
    Listed(IN_PLACE, r"^compile: .*, (type|unwrapped|evaluated, tuple\[0\])$", "OptimizedModule", "(class|object) Sequential"),
    Listed(IN_PLACE, r"^compile: .*, recognised, \[\d\]$", "true", "false"),
    Listed(IN_PLACE, r"^compile: .*, (keys|dict), \[\d+\]$", r"^_orig_mod\.", r"^(?!_orig_mod)"),
    Listed(
        "They also hold `manifest.json` and hidden files",
        r", (files|other|saved|tuple\[\d\]|saved, tuple\[\d\])",
        test=_with_a_manifest,
    ),
    Listed(ON_THE_HOST, BIG, "^meta$", "^cpu$"),
    Listed(STREAMED, BIG + r".*hook", "^AlignDevicesHook$", "^StreamedHook$"),
    Listed(FILES, BIG + r".*(files|left)$", r"\.dat", test=_no_dat),
    Listed(FILES, BIG + r".*index$", r"dtype", "FileNotFoundError"),
    Listed(FILES, r"^loading: loaded_to_a_disk, .*half, (answer|equal)", "must have the same dtype"),
    Listed("Weights that are tied stay tied", BIG + r".*(tied|pointers)$", "^false$", "^true$"),
    Listed("Weights that are tied stay tied", BIG + r".*place.*head\.weight", "^meta$", r"^\(nothing\)$"),
    Listed("Weights that are tied stay tied", r"^dispatch: .*tied.*, rest on, head\.weight$", "^meta$", "^cuda:0$"),
    Listed(RESTING_WEIGHTS, BIG + r".*, cpu$", "NotImplementedError", "^class Model$"),
    Listed(RESTING_WEIGHTS, BIG + r".*, (to the device|cuda)$", "NotImplementedError", "DeviceError"),
    Listed(RESTING_WEIGHTS, BIG + r".*, places (after the moves|without hooks), ", "^(cuda:0|meta)$", "^cpu$"),
    Listed(RESTING_WEIGHTS, "^offload: .*, again on the device$", "true", "false"),
    Listed(PREPARED_TWICE, "^offload: offloaded_state_dicts, host, prepared$", "NotImplementedError", "^class Model$"),
    Listed(PREPARED_TWICE, "^dispatch: copies_of_dispatched_models, places again, ", "^meta$", "^cuda:0$"),
    Listed(PREPARED_TWICE, "^dispatch: copies_of_dispatched_models, told, log", "shouldn't move", ""),
    Listed("stay also after `cpu_offload`", r"^offload: aligned_modules, changed, \[0\]$"),
    Listed("A streamed model cannot be pickled", "^dispatch: .*, pickled$", "AttributeError", "PrepareError"),
    Listed("Moves are refused by objects", r"^dispatch: .*, methods, \[0\]$", "^function$", "_Move"),
    Listed("`forward` is an object of hasten's", r"^dispatch: .*, methods, ", "^partial$", "PlacedForward"),
    Listed("a model that is wholly on the disk", "^dispatch: wrong_maps, all on the disk$", "FileNotFoundError", "^cpu$"),
    Listed("a model that is wholly on the disk", "^dispatch: wrong_maps, told, log$", r"^\[\]$", "to the disk"),
    Listed("takes integer values for a float", r"^maps: tensors_set_by_name, torch\.int8$", "RuntimeError"),
    Listed("names the places in the map's order", BIG + r".*told, log", "disk and cpu", "cpu and disk"),
    Listed(ON_THE_HOST, BIG + r".*told, warnings", "model is on meta", "model is on cpu"),
    Listed("**Batches are copied ahead** on devices with streams", r"^data: large_batches, .*\[0\]$", test=_greater),
    Listed("**fp16 on the CPU** is computed in fp16", r"^state: .*fp16.*(native_amp|scaler|scale)$", "null|false|NoneType"),
    Listed("**The order of a shuffled stateful loader** on one process", r"(by_configuration|configured_loaders).*, stateful"),
    Listed("`LayerwiseCastingHook` casts inputs as well", "^hooks: casting_layers, .*, ahead$", "must have the same dtype"),
    Listed("parameters built under `init_empty_weights()` stay tied", "^maps: empty_models, tied$", "false", "true"),
    Listed("defaults are not (`ACCELERATE_MIXED_PRECISION=no`, …)", "^launch.*, variables$", test=_fewer),
    Listed(
        "`accelerate launch` logs no list of the flags that have their defaults",
        "^launch.*, errors$",
        "The following values were not passed",
        r"^\[\]$",
    ),
    Listed(SCALES, r"^(state|precision|checkpoints): .*scaler", "GradScaler", "LossScaler"),
    Listed(SCALES, "^precision: scaled_gradients, ", "has already been called on this optimizer"),
    Listed(SCALES, "^precision: weights_in_half, ", "Attempting to unscale FP16", "Attempting to unscale FP16"),
    Listed("two optimizers change the loss scale twice", "^precision: an_overflow_of_one_of_two_optimizers, scale$"),
    Listed("are float32 in half precision", r"^sharded: shards_in_bf16, (losses|norms|weights)"),
    Listed("is an object of hasten's instead of a method", "^precision: (outputs_in_float32, forward|models_without_their_.*bound)"),
    Listed(BY_NAME, r"^checkpoints: .*, optimizer\.bin, "),
    Listed("Tensors in pickled files lie on the host", "^checkpoints: saved_models, pickled", "^cuda", "^cpu$"),
    Listed(SHARDS_OF_HASTEN, r"^sharded: .*, files$", r"\.distcp", r"_shard_"),
    Listed("They also hold `manifest.json` and hidden files", r"^sharded: .*, files$", test=_with_a_manifest),
    Listed("fp8 by torchao without FSDP never trains", "^fp8: fp8_by_torchao.*, (dtypes|losses|weights)"),
    Listed("`is_..._available()` says False", "^(probes|fp8): ", "^null$", "^false$"),
    Listed("a ValueError that names the known ones", "^probes: a_notebook, wrong precision$", "AttributeError", "ValueError"),
    Listed("`clip_grad_value_` fails on a GPU where", "^windows: .*, norm by value$", "RuntimeError", "null"),
    Listed(AS_TOLD, "^launch.*: launched_by_number, (steps|variables)$"),
    Listed(AS_TOLD, "^launch.*: launched_as_several, "),
    Listed("More processes than devices are refused", "^launch.*: launched_with_too_many, "),
    Listed("**A model without its optimizer** may be prepared", "^launch.*: launched_with_shards, "),
    Listed(IN_PLACE, "^launch.*, model$", "OptimizedModule", "^(?!OptimizedModule)"),
    Listed(NO_GROUP, "^launched: (attributes|operations|blocks|the_group)_under_torchrun, "),
    Listed("how many samples the last batch has", "^data: loaders_made_by_hand, skipped", "^-1$"),
    Listed("raises an AttributeError | it is None", "total_batch_size$", "AttributeError", "^null$"),
    Listed("a quantized model whose map names the CPU may be prepared", "^state: .*, 8 bit$", "ValueError"),
    Listed(NO_GROUP, "^sharded: shards_by_sizes, one$", "MULTI_GPU", r"DistributedType\.NO"),
    Listed("MS-AMP is refused", "^fp8: .*, msamp recipe, accelerator$", "", "NotImplementedError"),
    Listed("returns what the first process returns", "^probes: a_notebook, ", "^null$", r"^\["),
    Listed(NO_GROUP, "^launched: .*(distributed_type|kind|type|again)", "MULTI_GPU", r"DistributedType\.NO"),
    Listed(NO_GROUP, "^launched: .*types", "DistributedDataParallel", "^class "),
    Listed(NO_GROUP, "^launched: .*own keys", r"^module\.", r"^(?!module\.)"),
)  # fmt: skip


def listed(group: str, where: str, original: Any, dropin: Any) -> str:
    """The words of the line that lists a difference, or nothing."""
    matching_lines = (
        difference.line
        for difference in LISTED
        if difference.covers(f"{group}: {where}", original, dropin)
    )
    return next(matching_lines, "")


def absent() -> list[str]:
    """Words that the page does not have any more."""
    text = PAGE.read_text(encoding="utf-8")
    return [difference.line for difference in LISTED if difference.line not in text]
