"""Groups for a reducer that exchange in another way: with Adasum, or the user's compression."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from horo_lite.collectives.compression import Compressor
from horo_lite.collectives.group import Group
from horo_lite.collectives.handle import Handle
from horo_lite.collectives.reductions import Op
from horo_lite.horovod.adasum import GroupView
from horo_lite.horovod.reductions import AdasumOp
from horo_lite.torch.adasum import adasum_async_, warn_of_compression


class _GroupView(GroupView):
    """The same, with asynchronous exchanges as well."""

    def exchange(self, arrays: Sequence[Any], **options: Any) -> bool:
        self.exchange_async(arrays, **options).wait()
        return True

    def exchange_async(self, arrays: Sequence[Any], **options: Any) -> Handle:
        raise NotImplementedError


class _Adasum(_GroupView):
    """Makes exchanges Adasums."""

    def exchange_async(self, arrays: Sequence[Any], **options: Any) -> Handle:
        return adasum_async_(self.group(), arrays, options["names"], options["label"])


class _Compressing(_GroupView):
    """Calls the user's own compressor before and after."""

    def __init__(self, group: Group, compressor: Any) -> None:
        super().__init__(group)
        self._compressor = compressor

    def exchange_async(self, arrays: Sequence[Any], **options: Any) -> Handle:
        pairs = [self._compressor.compress(array) for array in arrays]
        small = [tensor.contiguous() for tensor, _ in pairs]
        handle = self.group().exchange_async(small, **options)

        def finish() -> None:
            for array, tensor, (_, context) in zip(arrays, small, pairs, strict=True):
                array.copy_(self._compressor.decompress(tensor, context))

        return handle.then(finish)


def group_for(group: Group, op: Op | AdasumOp, compression: Any) -> Any:
    """Return the reducer's group, or the one view of it, since reducers are numbered by group."""
    if isinstance(op, AdasumOp):
        if group.rank == 0:
            warn_of_compression(compression)
        return _views.setdefault(group, {}).setdefault("Adasum", _Adasum(group))
    if not isinstance(compression, Compressor):
        view = _Compressing(group, compression)  # it keeps the compressor, and thus its id
        return _views.setdefault(group, {}).setdefault(id(compression), view)
    return group


_views: weakref.WeakKeyDictionary[Group, dict[Any, Any]] = weakref.WeakKeyDictionary()
