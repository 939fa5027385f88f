"""What `horo_lite.DistributedOptimizer` does with an optimizer of torch's."""

from __future__ import annotations

from typing import Any

import torch

from horo_lite.collectives.group import Group
from horo_lite.torch import optimizer as torch_optimizer


def DistributedOptimizer(  # noqa: N802 (the name that horo_lite.DistributedOptimizer looks for)
    optimizer: Any, *, parameters: Any = None, group: Group | None = None, **options: Any
) -> Any:
    """`horo_lite.torch.DistributedOptimizer` with the options of `horo_lite.DistributedOptimizer`.

    Its own options are understood, too.

    Args:
        optimizer: A torch.optim.Optimizer.
        parameters: Not understood: the optimizer has them.
        group: The ranks; default all. What `process_set` is in horo_lite.torch.
        **options: Those of horo_lite.torch.DistributedOptimizer.

    Raises:
        TypeError: `parameters` was given, or `optimizer` is another object of torch's.
        ValueError: As horo_lite.torch.DistributedOptimizer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} is not an optimizer: horo_lite.DistributedOptimizer takes "
            "an object such as torch.optim.SGD(model.parameters(), lr=0.1)"
        )
    if parameters is not None:
        raise TypeError(
            "horo_lite.DistributedOptimizer takes no parameters= with an optimizer of torch's, "
            "whose param_groups are exchanged: leave it out. Names for error messages: "
            "named_parameters=model.named_parameters()"
        )
    if group is not None:
        if "process_set" in options:
            raise TypeError("horo_lite.DistributedOptimizer takes group= or process_set=, not both")
        options["process_set"] = group
    return torch_optimizer.DistributedOptimizer(optimizer, **options)
