"""Convolutions that are matmuls, and others, for the files test_convolutions_as_matmuls.py of two tiers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# their overloads do not know that a starred argument has three tensors
conv1d: Any = F.conv1d
conv2d: Any = F.conv2d
conv3d: Any = F.conv3d
conv_transpose1d: Any = F.conv_transpose1d
conv_transpose2d: Any = F.conv_transpose2d
conv_transpose3d: Any = F.conv_transpose3d
LAST, LAST_3D = torch.channels_last, torch.channels_last_3d


@dataclass(frozen=True)
class Form:
    """A call of a convolution. shapes: of input, weight and bias. x, w: memory formats; None for the usual one."""

    call: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    x: torch.memory_format | None = None
    w: torch.memory_format | None = None
    copies_weight: bool = False


def leaves(form: Form) -> list[Tensor]:
    """Return the input, and weight and bias as parameters, whose sizes are never symbolic."""
    torch.manual_seed(0)
    formats = [form.x, form.w, None]
    tensors = [torch.randn(shape) / 4 for shape in form.shapes]
    kept = [t if f is None else t.to(memory_format=f) for t, f in zip(tensors, formats, strict=False)]
    return [kept[0].requires_grad_(), *map(torch.nn.Parameter, kept[1:])]


FORMS: dict[str, Form] = {
    "kernel 1": Form(conv2d, ((2, 32, 6, 5), (48, 32, 1, 1), (48,))),
    "kernel 1, channels last": Form(conv2d, ((2, 32, 6, 5), (48, 32, 1, 1), (48,)), LAST, LAST),
    "kernel 1, input last": Form(conv2d, ((2, 32, 6, 5), (48, 32, 1, 1)), LAST),
    "kernel 1, same": Form(lambda *x: conv2d(*x, padding="same"), ((2, 32, 6, 5), (48, 32, 1, 1))),
    "kernel 1, stride 2": Form(lambda *x: conv2d(*x, stride=2), ((2, 32, 7, 6), (48, 32, 1, 1), (48,))),
    "kernel 1, dilated": Form(lambda *x: conv2d(*x, dilation=3), ((2, 32, 7, 6), (48, 32, 1, 1))),
    "patches": Form(lambda *x: conv2d(*x, stride=4), ((2, 3, 16, 20), (32, 3, 4, 4), (32,))),
    "patches, remainder": Form(lambda *x: conv2d(*x, stride=4), ((2, 3, 18, 23), (32, 3, 4, 4), (32,))),
    "patches, channels last": Form(lambda *x: conv2d(*x, stride=2), ((2, 16, 8, 9), (32, 16, 2, 2)), LAST, LAST),
    "patches, weight last": Form(lambda *x: conv2d(*x, stride=2), ((2, 16, 8, 8), (32, 16, 2, 2)), None, LAST),
    "patches, input last": Form(lambda *x: conv2d(*x, stride=2), ((2, 16, 8, 8), (32, 16, 2, 2)), LAST),
    "rows": Form(lambda *x: conv2d(*x, stride=(1, 3)), ((2, 16, 5, 9), (32, 16, 1, 3), (32,))),
    "the whole": Form(conv2d, ((4, 16, 3, 3), (32, 16, 3, 3), (32,))),
    "no batch": Form(lambda *x: conv2d(*x, stride=2), ((16, 8, 9), (32, 16, 2, 2), (32,))),
    "1d, kernel 1": Form(conv1d, ((2, 32, 9), (48, 32, 1), (48,))),
    "1d, patches": Form(lambda *x: conv1d(*x, stride=3), ((2, 32, 10), (48, 32, 3), (48,))),
    "1d, no batch": Form(conv1d, ((32, 9), (48, 32, 1))),
    "3d, patches": Form(lambda *x: conv3d(*x, stride=(2, 4, 4)), ((2, 3, 4, 8, 9), (32, 3, 2, 4, 4), (32,))),
    "3d, channels last": Form(
        lambda *x: conv3d(*x, stride=2), ((2, 8, 4, 4, 6), (32, 8, 2, 2, 2), (32,)), LAST_3D, LAST_3D
    ),
    "transposed": Form(lambda *x: conv_transpose2d(*x, stride=2), ((2, 32, 5, 4), (32, 16, 2, 2), (16,))),
    "transposed, kernel 1": Form(conv_transpose2d, ((2, 32, 5, 4), (32, 16, 1, 1), (16,))),
    "transposed, channels last": Form(
        lambda *x: conv_transpose2d(*x, stride=(2, 3)), ((2, 32, 5, 4), (32, 16, 2, 3), (16,)), LAST, LAST
    ),
    "transposed, one dim": Form(lambda *x: conv_transpose2d(*x, stride=(1, 3)), ((2, 32, 5, 4), (32, 16, 1, 3), (16,))),
    "transposed, 1d": Form(lambda *x: conv_transpose1d(*x, stride=4), ((2, 32, 5), (32, 16, 4), (16,))),
    "transposed, 3d": Form(lambda *x: conv_transpose3d(*x, stride=2), ((2, 16, 3, 2, 4), (16, 8, 2, 2, 2), (8,))),
    "transposed, no batch": Form(lambda *x: conv_transpose2d(*x, stride=2), ((32, 5, 4), (32, 16, 2, 2), (16,))),
}

_IMAGE = (2, 16, 8, 8)
OTHERS: dict[str, tuple[Form, str]] = {
    "kernel 3": (Form(conv2d, (_IMAGE, (32, 16, 3, 3))), "a kernel of 3 x 3, stride 1 x 1:"),
    "padding": (Form(lambda *x: conv2d(*x, padding=1), (_IMAGE, (32, 16, 1, 1))), "stride 1 x 1, padding 1 x 1:"),
    "same": (Form(lambda *x: conv2d(*x, padding="same"), (_IMAGE, (32, 16, 3, 3))), "padding same"),
    "groups": (Form(lambda *x: conv2d(*x, groups=2), (_IMAGE, (32, 8, 1, 1))), "2 groups"),
    "overlap": (Form(lambda *x: conv2d(*x, stride=2), (_IMAGE, (32, 16, 4, 4))), "a kernel of 4 x 4, stride 2 x 2"),
    "gaps": (Form(lambda *x: conv2d(*x, stride=4), (_IMAGE, (32, 16, 2, 2))), "a kernel of 2 x 2, stride 4 x 4"),
    "dilation": (Form(lambda *x: conv2d(*x, stride=2, dilation=2), (_IMAGE, (32, 16, 2, 2))), "dilation 2 x 2"),
    "output padding": (
        Form(lambda *x: conv_transpose2d(*x, stride=2, output_padding=1), (_IMAGE, (16, 8, 2, 2))),
        "output padding 1 x 1",
    ),
    "transposed, kernel 3": (
        Form(lambda *x: conv_transpose2d(*x, stride=2), (_IMAGE, (16, 8, 3, 3))),
        "a kernel of 3 x 3, stride 2 x 2",
    ),
    "transposed, kernel 1, stride 2": (
        Form(lambda *x: conv_transpose2d(*x, stride=2), (_IMAGE, (16, 8, 1, 1))),
        "a kernel of 1 x 1, stride 2 x 2",
    ),
}
"""Convolutions that are no matmul, with a part of the reason."""
