"""`fp8pass.train_step`: forward, backward and update of a step, compiled; FP8 copies of weights that it keeps."""

from __future__ import annotations

import functools

import torch

from fp8pass.scaling import E4M3, quantize
from tests.helpers.harness import sqnr
from tests.helpers.train_step import changed_again, decorate, tensors, weights


def test_weights_that_are_changed_again_in_the_same_graph() -> None:
    """Inductor's CPU code has no loops for this unless it is told, if there are two weights: `choices.can_fuse`.

    The copies are those of the weights as they are stored; the numbers about those that op by op has without copies.
    """
    losses, state, model = changed_again(functools.partial(decorate, lowering="inductor"))
    for layer in model.children():
        (w,) = weights(layer)
        assert w.is_fresh() and w.requantized == 2, "the updates have made it"
        assert w.state is not None
        scale_inv = w.state.tensors.weight_copy_scales[0, w.index]
        stored = layer.get_parameter("weight").detach()
        assert torch.equal(w.x_q.float(), quantize(stored, 1 / scale_inv, E4M3).float())
        assert (w.x_t is None) == (layer is next(model.children())), "whose input needs no gradient"
        assert w.x_t is None or torch.equal(w.x_t.float(), w.x_q.float().t())
    wanted, other, _ = changed_again(functools.partial(decorate, weight_cache="off"))
    found = dict(tensors([losses, state]))
    for name, x in tensors([wanted, other]):
        assert sqnr(x, found[name]) > 50, name
