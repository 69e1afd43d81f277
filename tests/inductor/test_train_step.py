"""`fp8pass.train_step` through Inductor: an update that changes a weight twice writes its FP8 copy correctly."""

from __future__ import annotations

import functools

import torch

from fp8pass.base.scaling import E4M3, quantize
from fp8pass.weights.weight_copy import DelayedWeight
from tests.helpers.harness import sqnr
from tests.helpers.train_step import changed_again, decorate, tensors, weights


def test_weights_that_are_changed_again_in_the_same_graph() -> None:
    """Inductor's CPU code generation fails on this with two weights, unless `choices.can_fuse` declines a fusion.

    The copies are those of the weights as they are stored; losses and state are close to those op by op without copies.
    """
    losses, state, model = changed_again(functools.partial(decorate, lowering="inductor"))
    for layer in model.children():
        (w,) = weights(layer)
        assert w.is_fresh() and w.requantized == 2, "the updates have not written the copy"
        assert isinstance(w, DelayedWeight) and w.x_q is not None
        scale_inv = w.state.tensors.weight_copy_scales[0, w.index]
        stored = layer.get_parameter("weight").detach()
        assert torch.equal(w.x_q.float(), quantize(stored, 1 / scale_inv, E4M3).float())
        assert (w.x_t is None) == (layer is next(model.children())), (
            "only the first layer, whose input needs no gradient, has no transposed copy"
        )
        assert w.x_t is None or torch.equal(w.x_t.float(), w.x_q.float().t())
    wanted, other, _ = changed_again(functools.partial(decorate, weight_cache="off"))
    found = dict(tensors([losses, state]))
    for name, x in tensors([wanted, other]):
        assert sqnr(x, found[name]) > 50, name
