"""The run's state on one rank, as it is sent to heal another replica: weights, optimizers and the rest, in local shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, Final

from torch import Tensor, nn

from hasten.errors import HastenError
from hasten.extensions.survive.healing import State
from hasten.modules.names import is_dtensor, like_parameter, local_tensor
from hasten.prepare_args import PreparedObjects

_SHARD: Final = "hasten_local_shard"
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

    def collected(self) -> State:
        """Return the state of this rank; it holds no sharded tensors."""
        prepared = self._prepared
        state: State = {
            "models": [self._unwrap(model).state_dict() for model in prepared.models],
            "optimizers": [one.optimizer.state_dict() for one in prepared.optimizers],
            "updates": [one.num_updates for one in prepared.optimizers],
            "schedulers": [one.state_dict() for one in prepared.schedulers],
            "averages": [one.state_dict() for one in prepared.averages],
            "registered": [one.state_dict() for one in self.registered()],
        }
        local: State = as_local(state)
        return local

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state of the same rank of another replica."""
        prepared = self._prepared
        for model, values in zip(prepared.models, state["models"], strict=True):
            module = self._unwrap(model)
            module.load_state_dict(as_shards(values, module.state_dict()))
        for optimizer, values, updates in zip(
            prepared.optimizers, state["optimizers"], state["updates"], strict=True
        ):
            inner = optimizer.optimizer
            parameters = [
                parameter
                for group in inner.param_groups
                for parameter in group["params"]
            ]
            shards = {
                index: {
                    name: as_shards(value, parameters[index])
                    for name, value in of_one.items()
                }
                for index, of_one in values["state"].items()
            }
            inner.load_state_dict({**values, "state": shards})
            optimizer.num_updates = optimizer.num_attempts = updates
        for scheduler, values in zip(
            prepared.schedulers, state["schedulers"], strict=True
        ):
            scheduler.load_state_dict(values)
            scheduler.caught_up()
        for one, values in [
            *zip(prepared.averages, state["averages"], strict=True),
            *zip(self.registered(), state["registered"], strict=True),
        ]:
            one.load_state_dict(
                as_shards(values, one.state_dict()) if _holds_shards(values) else values
            )


# Any: state dicts of models, optimizers and users' objects
def as_local(tree: Any) -> Any:
    """Return the tree with the local shard in place of each sharded tensor."""
    if isinstance(tree, Tensor):
        return {_SHARD: local_tensor(tree).detach()} if is_dtensor(tree) else tree
    if isinstance(tree, dict):
        return _filled(tree, {name: as_local(value) for name, value in tree.items()})
    if type(tree) in (list, tuple):
        return type(tree)(as_local(value) for value in tree)
    return tree


def as_shards(tree: Any, like: Any) -> Any:  # Any: as above
    """Return the tree with a sharded tensor in place of each local shard, laid out as the tensor at its place in `like`.

    `like` may also be one sharded tensor, for all of the tree.
    Raises: HastenError if this rank holds no sharded tensor there.
    """
    if isinstance(tree, dict) and _SHARD in tree:
        local = tree[_SHARD]
        if not is_dtensor(like) or local_tensor(like).shape != local.shape:
            raise HastenError(
                f"another replica has sent a shard of shape {tuple(local.shape)}, and this rank holds {_words(like)} in its place, so it cannot be "
                "healed. Run the same script with the same number of processes and the same settings on all replicas."
            )
        return like_parameter(local.to(local_tensor(like).device), like)
    if isinstance(tree, dict):
        return _filled(
            tree,
            {name: as_shards(value, _at(like, name)) for name, value in tree.items()},
        )
    if type(tree) in (list, tuple):
        return type(tree)(
            as_shards(value, _at(like, index)) for index, value in enumerate(tree)
        )
    return tree


def _filled(like: dict[Any, Any], values: dict[Any, Any]) -> dict[Any, Any]:
    """Return a copy of the dict, with its attributes, and with these values."""
    made = copy(like)
    made.update(values)
    return made


def _at(like: Any, place: Any) -> Any:
    """Return the value at this place of a mapping or sequence; None if there is none."""
    if isinstance(like, Tensor):
        return like
    try:
        return like[place]
    except (KeyError, IndexError, TypeError):
        return None


def _holds_shards(tree: Any) -> bool:
    if isinstance(tree, dict):
        return _SHARD in tree or any(map(_holds_shards, tree.values()))
    return type(tree) in (list, tuple) and any(map(_holds_shards, tree))


def _words(like: Any) -> str:
    return (
        f"one of shape {tuple(local_tensor(like).shape)}"
        if is_dtensor(like)
        else "no sharded tensor"
    )
