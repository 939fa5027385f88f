"""One copy of the parameters for all ranks of a host, in which each rank updates its share.

Parameters move there when the optimizer's state is divided, which all ranks do together, after they
have compared them. From then on a rank may write its share between two barriers only, in step():
before the first one, others may still compute with the old values, and after the second, all have
the new ones. What the user writes, all ranks see at once.

If there are several hosts, updates are received between the barriers as without this option: what a
rank receives of others on its host is what they have written there.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from horo_lite._native import Segment
from horo_lite.collectives.calls import Compare, Part, gathered
from horo_lite.collectives.shared_memory import common
from horo_lite.errors import warn
from horo_lite.torch.bucket_views import places_of, view_of

if TYPE_CHECKING:
    from horo_lite.collectives.group import Group

# Such memory, and where it ends. Not by parameter: torch cannot swap tensors with weak references.
_ends: WeakKeyDictionary[Segment, int] = WeakKeyDictionary()


class SharedParameters:
    """Those of an optimizer's parameters that are in memory of all ranks of a host."""

    def __init__(self, group: Group, views: Mapping[int, tuple[Any, Any]]) -> None:
        self._group = group
        self._here = group.transport.here
        self.is_of_all = len(self._here) == group.size
        """Whether all ranks are on one host."""
        self._views = dict(views)
        """Parameters and their memory, by the parameter's number in the optimizer."""
        self._versions: dict[int, int] = {}
        self._has_warned = False
        for parameter, view in self._views.values():
            if parameter.data_ptr() != view.data_ptr():
                parameter.data = view
        self.note_versions()

    def receives(self, i: int) -> bool:
        """Return whether ranks receive others' updates of parameter i."""
        return i not in self._views or not self.is_of_all

    def are_there(self) -> bool:
        """Return whether this rank still has its parameters in the memory."""
        return all(p.data_ptr() == view.data_ptr() for p, view in self._views.values())

    def kept(self, group: Group, parameters: Sequence[Any]) -> dict[int, Any]:
        """Return the memory of those of an optimizer's current parameters that are still there."""
        if group is not self._group or group.is_closed:
            return {}
        views = {id(p): view for p, view in self._views.values() if p.data_ptr() == view.data_ptr()}
        layouts = [(p.shape, p.stride(), p.dtype) for p in parameters]
        return {
            i: view
            for i, (p, layout) in enumerate(zip(parameters, layouts, strict=True))
            if (view := views.get(id(p))) is not None
            and layout == (view.shape, view.stride(), view.dtype)
        }

    def note_versions(self) -> None:
        """Note that changes of the parameters so far are right."""
        self._versions = {i: parameter._version for i, (parameter, _) in self._views.items()}

    def begin_update(
        self, group: Group, label: str, names: Sequence[str], changes: Sequence[bool]
    ) -> None:
        """Wait until no rank computes with the parameters any more. Collective.

        Warn once if several ranks of this host have changed them in place since the last
        `note_versions()`.

        Args:
            group: The ranks.
            label: The update's name.
            names: Those of the optimizer's parameters.
            changes: Whether the update may change them. MismatchError if ranks differ in that.
        """
        changed = [i for i, (p, _) in self._views.items() if p._version != self._versions[i]]
        headers = group.run(
            Compare(label, "\n".join(compress(names, changes))), Part(number=len(changed))
        )
        ranks = [r for r in self._here if headers[r].count]
        if len(ranks) > 1 and group.rank == ranks[0] and not self._has_warned:
            self._has_warned = True
            warn(
                f"the parameter {names[changed[0]]!r} was changed in place, on {len(ranks)} ranks "
                "of this host, between steps. With shared_parameters=True, these have one copy of "
                f"it, so the change was made {len(ranks)} times: right for loading or clamping "
                "values, wrong for adding or scaling. Make such changes on one rank of each host, "
                "between two calls of hvd.barrier(), or omit shared_parameters"
            )


def share_parameters(
    group: Group, parameters: Sequence[Any], before: SharedParameters | None, owner: object
) -> SharedParameters | None:
    """Move parameters, which are equal on all ranks, to a memory for each host; None if impossible.

    Collective. Parameters that cannot be there (on GPUs, or not floating point) stay where they
    are, and so do those that are there on all ranks since `before`: programs may have views of
    them. The values are complete after the next `begin_update()`. When `owner` no longer exists,
    what a rank writes to the memory becomes invisible to the others.
    """
    kept = {} if before is None else before.kept(group, parameters)
    everyone = gathered(group, set(kept), "parameters in shared memory")
    there = set.intersection(*everyone)
    rest = [i for i in range(len(parameters)) if i not in there]
    views = {i: (parameters[i], kept[i]) for i in sorted(there)}
    begins, n_bytes = places_of([parameters[i] for i in rest])
    if n_bytes or not there:
        memory = common(group, n_bytes)
        if memory is None:
            _end(group, parameters)
            return None
        _ends[memory.segment] = memory.segment.address + n_bytes
        weakref.finalize(owner, _make_private, weakref.ref(memory.segment)).atexit = False
        for i, begin in zip(rest, begins, strict=True):
            if begin is not None:
                views[i] = parameters[i], view_of(memory, begin, parameters[i])
                if group.rank == group.transport.here[0]:
                    views[i][1].copy_(parameters[i].detach())
    return SharedParameters(group, views)


def _end(group: Group, parameters: Sequence[Any]) -> None:
    """Warn, and give this rank a copy of its own of parameters that were shared until now."""
    for parameter in parameters:
        make_own(parameter)
    if group.rank == 0:
        warn(
            "shared_parameters=True has no effect: a host has no shared memory left, or its ranks "
            "cannot access each other's (do they run as one user, in one container?). Each rank "
            "keeps its own copy"
        )


def _make_private(segment: weakref.ref[Segment]) -> None:
    if (found := segment()) is not None:
        found.make_private()


def make_own(parameter: Any) -> None:
    """Give this rank a copy of its own of a parameter that it shares with others."""
    address = parameter.data_ptr()
    if any(segment.address <= address < end for segment, end in list(_ends.items())):
        parameter.data = torch.clone(parameter.detach())
