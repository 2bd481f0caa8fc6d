"""Learning-rate schedules in a script for Accelerate: lengths in steps of all processes, converted to updates."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import MappingProxyType
from typing import Final

# class or function -> (name, position) of each argument that counts steps
_WARMED: Final = (("num_warmup_steps", 1), ("num_training_steps", 2))
COUNTS: Final = MappingProxyType[str, tuple[tuple[str, int], ...]](
    {
        "OneCycleLR": (("total_steps", 2), ("steps_per_epoch", 4)),
        "CosineAnnealingLR": (("T_max", 1),),
        "CosineAnnealingWarmRestarts": (("T_0", 1),),
        "LinearLR": (("total_iters", 3),),
        "ConstantLR": (("total_iters", 2),),
        "PolynomialLR": (("total_iters", 1),),
        "StepLR": (("step_size", 1),),
        "get_scheduler": (("num_warmup_steps", 2), ("num_training_steps", 3)),
        "get_linear_schedule_with_warmup": _WARMED,
        "get_cosine_schedule_with_warmup": _WARMED,
        "get_cosine_with_hard_restarts_schedule_with_warmup": _WARMED,
        "get_polynomial_decay_schedule_with_warmup": _WARMED,
        "get_constant_schedule_with_warmup": _WARMED[:1],
    }
)


def lengths(tree: ast.Module, owners: set[str], main: str) -> Iterator[tuple[ast.expr, str]]:
    """Yield each expression that counts steps of a schedule that is prepared later, with the name of its Accelerator.

    `owners` are the names of Accelerators, `main` the name of their class. Nothing is yielded for a script in which Accelerate
    itself steps a schedule once per update (`split_batches`, `step_scheduler_with_optimizer=False`).
    """
    nodes = list(ast.walk(tree))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    if any(one.arg in ("split_batches", "step_scheduler_with_optimizer") for call in calls for one in call.keywords):
        return
    made = {
        target.id: node.lineno
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _last(node.value.func) == main
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for owner, name, line in _prepared(calls, owners):
        for node in nodes:
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                continue
            named = any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
            if named and made.get(owner, node.lineno) < node.lineno < line:
                yield from ((found, owner) for found in _counts(node.value))


def _prepared(calls: list[ast.Call], owners: set[str]) -> Iterator[tuple[str, str, int]]:
    """Yield (Accelerator, name, line) for each variable passed to prepare and prepare_scheduler."""
    for call in calls:
        method = call.func
        if (
            isinstance(method, ast.Attribute)
            and method.attr in ("prepare", "prepare_scheduler")
            and isinstance(method.value, ast.Name)
            and method.value.id in owners
        ):
            yield from ((method.value.id, one.id, call.lineno) for one in call.args if isinstance(one, ast.Name))


def _counts(call: ast.Call) -> Iterator[ast.expr]:
    for name, position in COUNTS.get(_last(call.func), ()):
        given = [one.value for one in call.keywords if one.arg == name]
        given += call.args[position : position + 1]
        yield from (one for one in given if not (isinstance(one, ast.Constant) and not one.value))


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
