"""The run's state on one rank, as it is sent to heal another replica: weights, optimizers and the rest, in local shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from typing import Any, Final

from torch import Tensor, nn

from hasten.errors import HastenError
from hasten.extensions.survive.healing import RunStateDict
from hasten.modules.names import is_dtensor, like_parameter, local_tensor
from hasten.prepare_args import PreparedObjects

_SHARD_KEY: Final = "hasten_local_shard"
"""Key of a dict that stands for a sharded tensor, with the shard of one rank."""


class RunState:
    """Reader and writer of everything that a returning replica needs, except the ledger."""

    def __init__(
        self, prepared: PreparedObjects, unwrap: Callable[[nn.Module], nn.Module]
    ) -> None:
        self._prepared = prepared
        self._unwrap = unwrap
        # Any: objects with state_dict and load_state_dict
        self.registered: Callable[[], list[Any]] = list

    def collect_state(self) -> RunStateDict:
        """Return the state of this rank; it holds no sharded tensors."""
        prepared = self._prepared
        optimizers = prepared.optimizers
        state: RunStateDict = {
            "models": _state_dicts(map(self._unwrap, prepared.models)),
            "optimizers": _state_dicts(optimizer.optimizer for optimizer in optimizers),
            "updates": [optimizer.num_updates for optimizer in optimizers],
            "schedulers": _state_dicts(prepared.schedulers),
            "averages": _state_dicts(prepared.averages),
            "registered": _state_dicts(self.registered()),
        }
        local: RunStateDict = to_local_shards(state)
        return local

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of the same rank of another replica."""
        prepared = self._prepared
        for model, saved_values in zip(prepared.models, state["models"], strict=True):
            module = self._unwrap(model)
            module.load_state_dict(to_dtensors(saved_values, module.state_dict()))
        for optimizer, saved_values, num_updates in zip(
            prepared.optimizers, state["optimizers"], state["updates"], strict=True
        ):
            inner_optimizer = optimizer.optimizer
            parameters = []
            for group in inner_optimizer.param_groups:
                parameters += group["params"]
            state_shards = {}
            for parameter_index, parameter_state in saved_values["state"].items():
                state_shards[parameter_index] = to_dtensors(
                    parameter_state, parameters[parameter_index]
                )
            inner_optimizer.load_state_dict({**saved_values, "state": state_shards})
            optimizer.num_updates = optimizer.num_attempts = num_updates
        for scheduler, saved_values in zip(
            prepared.schedulers, state["schedulers"], strict=True
        ):
            scheduler.load_state_dict(saved_values)
            scheduler.caught_up()
        for stateful, saved_values in [
            *zip(prepared.averages, state["averages"], strict=True),
            *zip(self.registered(), state["registered"], strict=True),
        ]:
            if _holds_shards(saved_values):
                saved_values = to_dtensors(saved_values, stateful.state_dict())
            stateful.load_state_dict(saved_values)


# Any: objects with a state_dict
def _state_dicts(stateful_objects: Iterable[Any]) -> list[Any]:
    return [stateful.state_dict() for stateful in stateful_objects]


# Any: state dicts of models, optimizers and users' objects
def to_local_shards(state_tree: Any) -> Any:
    """Return the tree with the local shard in place of each sharded tensor."""
    if isinstance(state_tree, Tensor):
        if is_dtensor(state_tree):
            return {_SHARD_KEY: local_tensor(state_tree).detach()}
        return state_tree
    if isinstance(state_tree, dict):
        local_shards = {}
        for name, subtree in state_tree.items():
            local_shards[name] = to_local_shards(subtree)
        return _copy_with(
            state_tree,
            local_shards,
        )
    if type(state_tree) in (list, tuple):
        return type(state_tree)(map(to_local_shards, state_tree))
    return state_tree


def to_dtensors(state_tree: Any, model_tree: Any) -> Any:  # Any: as above
    """Return the tree with a sharded tensor in place of each local shard, laid out as the tensor at its place in `like`.

    `like` may also be one sharded tensor, for all of the tree.
    Raises: HastenError if this rank holds no sharded tensor there.
    """
    if isinstance(state_tree, dict) and _SHARD_KEY in state_tree:
        local_shard = state_tree[_SHARD_KEY]
        if (
            not is_dtensor(model_tree)
            or local_tensor(model_tree).shape != local_shard.shape
        ):
            raise HastenError(
                f"another replica has sent a shard of shape {tuple(local_shard.shape)}, and this rank holds {_describe_layout(model_tree)} in its place, so it cannot be "
                "healed. Run the same script with the same number of processes and the same settings on all replicas."
            )
        return like_parameter(
            local_shard.to(local_tensor(model_tree).device), model_tree
        )
    if isinstance(state_tree, dict):
        sharded_tensors = {}
        for name, subtree in state_tree.items():
            sharded_tensors[name] = to_dtensors(subtree, _value_at(model_tree, name))
        return _copy_with(
            state_tree,
            sharded_tensors,
        )
    if type(state_tree) in (list, tuple):
        sharded_members = []
        for index, subtree in enumerate(state_tree):
            sharded_members.append(to_dtensors(subtree, _value_at(model_tree, index)))
        return type(state_tree)(sharded_members)
    return state_tree


def _copy_with(
    original_dict: dict[Any, Any], new_values: dict[Any, Any]
) -> dict[Any, Any]:
    """Return a copy of the dict, with its attributes, and with these values."""
    copied_dict = copy(original_dict)
    copied_dict.update(new_values)
    return copied_dict


def _value_at(model_tree: Any, tree_key: Any) -> Any:
    """Return the value at this place of a mapping or sequence; None if there is none."""
    if isinstance(model_tree, Tensor):
        return model_tree
    try:
        return model_tree[tree_key]
    except (KeyError, IndexError, TypeError):
        return None


def _holds_shards(state_tree: Any) -> bool:
    if isinstance(state_tree, dict):
        return _SHARD_KEY in state_tree or any(map(_holds_shards, state_tree.values()))
    return type(state_tree) in (list, tuple) and any(map(_holds_shards, state_tree))


def _describe_layout(model_tensor: Any) -> str:
    if is_dtensor(model_tensor):
        return f"one of shape {tuple(local_tensor(model_tensor).shape)}"
    return "no sharded tensor"
