"""The base of tensor subclasses that stand for a tensor in another form, such as a weight in FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WrapperTensor(Tensor):
    """Base of tensor subclasses that run ops on the tensors they hold; subclasses implement `_run`."""

    _run: Any

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one op by `_run`."""
        return cls._dispatched(func, args, kwargs or {})

    # in a compiled train step, Dynamo would trace it as the user's code
    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _dispatched(cls, func: Any, args: Any, kwargs: Any) -> Any:
        return cls._run(func, args, kwargs)
