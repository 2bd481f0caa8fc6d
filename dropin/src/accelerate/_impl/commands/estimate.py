"""`accelerate estimate-memory`: the sizes of a model on the Hub in the established table; local models are hasten's answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

from accelerate._impl.environment.packages import (
    is_timm_available,
    is_transformers_available,
)
from accelerate._impl.environment.parsers import parser_of, runner
from accelerate._impl.models.other import convert_bytes
from accelerate._impl.models.planning import calculate_maximum_sizes
from accelerate._impl.surface.messages import message
from hasten.cli.main import main as hasten
from hasten.modules.meta import init_empty_weights
from hasten.optional import need

# Any in this file: argparse's namespaces, models and what the Hub says of them.
_PARTS: Final = {"float32": 1, "float16": 2, "int8": 4, "int4": 8}


def verify_on_hub(repo: str, token: str | None = None) -> Any:
    """Return what the Hub says of a model, "gated" if it does not let us in, "repo" if it has none of that name."""
    try:
        return model_info(repo, token=token)
    except OSError as error:  # the Hub's errors, and those of the way to it
        kinds = need("huggingface_hub.errors")
        is_gated = not isinstance(error, kinds.RepositoryNotFoundError) or isinstance(
            error, kinds.GatedRepoError
        )
        return "gated" if is_gated else "repo"


def model_info(repo: str, **options: Any) -> Any:
    return need("huggingface_hub").model_info(repo, **options)


def add_timm_hub_prefix(model_name: str) -> str:
    if "/" in model_name and ":" not in model_name:
        return f"hf-hub:{model_name}"
    return model_name


def check_has_model(error: Exception) -> str:
    if (
        is_timm_available()
        and isinstance(error, RuntimeError)
        and "Unknown model" in str(error)
    ):
        return "timm"
    missing = isinstance(
        error, OSError
    ) and "does not appear to have a file named" in str(error)
    if is_transformers_available() and missing:
        return "transformers"
    return "unknown"


def create_empty_model(
    model_name: str,
    library_name: str | None,
    trust_remote_code: bool = False,
    access_token: str | None = None,
) -> Any:
    info = verify_on_hub(model_name, access_token)
    if isinstance(info, str):
        raise OSError(
            message("model_gated", model_name)
            if info == "gated"
            else message("model_repo", model_name)
        )
    library = _check_arguments(model_name, library_name or info.library_name)
    print(f"Loading pretrained config for `{model_name}` from `{library}`...")  # noqa: T201  the command's answer
    if library == "transformers":
        return _of_transformers(
            model_name,
            info.config,
            trust_remote_code=trust_remote_code,
            token=access_token,
        )
    with init_empty_weights():
        return need("timm").create_model(
            add_timm_hub_prefix(model_name), pretrained=False
        )


def _check_arguments(name: str, library: str | None) -> str:
    if not library:
        raise ValueError(message("no_library_metadata", name))
    if library not in ("timm", "transformers"):
        raise ValueError(message("library_unknown", library))
    if not (is_timm_available() if library == "timm" else is_transformers_available()):
        raise ImportError(message("library_missing", name, library))
    return library


def _of_transformers(name: str, config_metadata: Any, **options: Any) -> Any:
    if config_metadata is None:
        raise RuntimeError(
            f"Tried to load `{name}` with `transformers` but it does not have any metadata."
        )
    kinds = [
        class_name
        for class_name in config_metadata.get("auto_map") or ()
        if class_name.startswith("AutoModel")
    ]
    config = need("transformers").AutoConfig.from_pretrained(name, **options)
    with init_empty_weights():
        class_name = getattr(need("transformers"), [*kinds, "AutoModel"][0])
        return class_name.from_config(
            config, dtype=torch.float32, trust_remote_code=options["trust_remote_code"]
        )


def estimate_training_usage(
    bytes: int, mixed_precision: str, msamp_config: str | None = None
) -> dict[str, int]:
    """Return the bytes of training with Adam by their use; -1 where it is not possible in that dtype."""
    half = mixed_precision in ("float16", "bfloat16", "" if msamp_config else "fp8")
    full = mixed_precision == "float32"
    if half or full:
        sizes = [
            bytes,
            2 * bytes,
            bytes + half * bytes // 2,
            (2 if half else 4) * bytes,
        ]
    else:
        sizes = [-1] * 4
    return dict(zip(("model", "optimizer", "gradients", "step"), sizes, strict=True))


def gather_data(args: Any) -> list[list[Any]]:
    """Return the rows of the table in bytes: dtype, largest layer, whole model, training."""
    load_options = {
        "library_name": args.library_name,
        "trust_remote_code": args.trust_remote_code,
    }
    try:
        model = create_empty_model(args.model_name, **load_options)
    except (RuntimeError, OSError) as error:
        if (library := check_has_model(error)) == "unknown":
            raise
        raise RuntimeError(
            message("no_model_inside", args.model_name, library)
        ) from error
    total, (largest, _) = calculate_maximum_sizes(model)
    sizes = {}
    for dtype, divisor in _PARTS.items():
        sizes[dtype] = [
            num_bytes / divisor if divisor > 1 else num_bytes
            for num_bytes in (largest, total)
        ]
    table_rows = []
    for dtype in args.dtypes:
        table_rows.append([dtype, *sizes[dtype], estimate_training_usage(total, dtype)])
    return table_rows


def create_ascii_table(headers: list[str], rows: list[list[str]], title: str) -> str:
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    if len(title) > sum(widths):
        widths[-1] += 2 * abs(len(title) - sum(widths) - len(widths) - 1)
    top, under, between, bottom = (
        line.join("─" * width for width in widths) for line in "─┬┼┴"
    )
    head, *cells = (
        f"│{'│'.join(map(str.center, row, widths))}│" for row in (headers, *rows)
    )
    above = [
        f"┌{top}┐",
        f"│{title.center(len(top))}│",
        f"├{under}┤",
        head,
        f"├{between}┤",
    ]
    return "\n".join([*above, *cells, f"└{bottom}┘"])


def estimate_command(args: Any) -> int | None:
    hub = need("huggingface_hub")
    offline = need("huggingface_hub.constants").HF_HUB_OFFLINE
    library_name = args.model_name
    if Path(library_name).exists() or (
        offline
        and isinstance(hub.try_to_load_from_cache(library_name, "config.json"), str)
    ):
        trusted = ["--trust_remote_code"] if args.trust_remote_code else []
        return hasten(
            ["estimate-memory", library_name, "--dtypes", *args.dtypes, *trusted]
        )
    rows = []
    for dtype, *row_sizes, uses in gather_data(args):
        row = [dtype]
        for num_bytes in (*row_sizes, max(uses.values())):
            row.append("N/A" if num_bytes < 0 else convert_bytes(num_bytes))
        rows.append(row)
    headers = ["dtype", "Largest Layer", "Total Size", "Training using Adam"]
    title = f"Memory Usage for loading `{library_name}`"
    print(create_ascii_table(headers, rows, title))  # noqa: T201  the answer
    return None


estimate_command_parser = parser_of("estimate-memory", estimate_command)
run, main = runner("estimate-memory", estimate_command_parser)
