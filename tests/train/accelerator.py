"""An accelerator to test with where there is none: torch's `meta` device, and what passes to and from it.

Tensors on it have shapes and no values. So whatever depends on values raises, which is what makes a host wait
for a GPU; and it is not the CPU, so code that asks takes the way of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import Self

META = torch.device("meta")
ATEN = torch.ops.aten
_PICKS = (ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default)


class _Made(TorchFunctionMode):
    """Counts tensors that are made on the device of the host's own numbers, for which it waits."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function."""
        del types
        made = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor):
            self.count += made.device == META
        return made


class Passing(TorchDispatchMode):
    """Counts the host's reads and waits while it is active, and refuses operations on both devices.

    What the host reads are ones, as many as there are; a mask that picks rows picks all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        """Times that the host had to know what the device had computed."""
        self._copies, self._made = 0, _Made()

    @property
    def waits(self) -> int:
        """Copies to the device that the host waits for."""
        return self._copies + self._made.count

    def __enter__(self) -> Self:
        """Begin to count."""
        self._made.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        """End it."""
        super().__exit__(*exception)
        self._made.__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        del types
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if not any(tensor.device == META for tensor in tensors):
            if func is ATEN._to_copy.default and kwargs.get("device") == META:
                self._copies += not kwargs.get("non_blocking", False)
            return func(*args, **kwargs)
        # a number of no dimensions is no more than an argument, on whichever side it is
        mixed = [tensor for tensor in tensors if tensor.device != META and tensor.dim()]
        assert not mixed, f"{func} of tensors on {[str(tensor.device) for tensor in tensors]}"
        return self._of_device(func, args, kwargs)

    def _of_device(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is ATEN._local_scalar_dense.default:
            self.reads += 1
            return 1.0 if args[0].is_floating_point() else 1
        if func is ATEN._to_copy.default and kwargs.get("device", META) != META:
            self.reads += 1
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func in _PICKS and any(index is not None and index.dtype == torch.bool for index in args[1]):
            self.reads += 1
            return args[0].clone()
        return func(*args, **kwargs)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor that is reached from a value through attributes, items and slots, however it is held."""
    seen: dict[int, Any] = {}
    found: list[Tensor] = []

    def look(one: Any) -> None:
        if id(one) in seen or isinstance(one, (str, bytes, int, float, type)):
            return
        seen[id(one)] = one
        if isinstance(one, Tensor):
            found.append(one)
            return
        parts: list[Any] = list(getattr(one, "__dict__", {}).values())
        parts += list(one.values()) if isinstance(one, dict) else []
        parts += list(one) if isinstance(one, (list, tuple, set)) else []
        for part in parts:
            look(part)

    look(value)
    return found


def recording(log: list[Tensor]) -> Callable[..., Tensor]:
    """In the place of a method of tensors: notes which one it was called on, and returns it."""

    def note(tensor: Tensor, *_arguments: Any) -> Tensor:
        log.append(tensor)
        return tensor

    return note
