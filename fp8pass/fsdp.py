"""FSDP2 with weights that travel in FP8: half the bytes of bfloat16.

    fp8pass.fsdp.enable_fp8_all_gather(model)          before fully_shard
    for block in model.blocks:
        block.compile(backend="fp8pass")
        fully_shard(block)
    fully_shard(model)

Each rank quantizes its shard of a weight, and FSDP gathers the bytes. All weights' scales follow from one all-reduce of
their amaxes, when the weights have changed: within `fp8pass.train_step` at its end, right behind the optimizer, and
else when the next forward begins. What a compiled graph gets is a tensor that is `dequantize(x_q, scale_inv)`
to whatever reads it: so the matmul is found as any other is. Parameters themselves, with what optimizers, clipping and
checkpoints see of them, stay in high precision.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fp8pass import scaling
from fp8pass._torch import before_eager_optimizers, make_wrapper_subclass, pytree
from fp8pass.errors import Fp8Error
from fp8pass.fields import Rule, called_with, several
from fp8pass.options.config import Config
from fp8pass.options.unmatched import check_models
from fp8pass.quant.sharded import amax_over, on_part, part_of
from fp8pass.recipes import matches

aten = torch.ops.aten


def _filter(name: str, value: Any) -> Any:
    patterns = several("a function (fqn) -> bool, or patterns of names to leave out, ['head', 'layers.0.*']")
    return (called_with(("",), "(fqn)") if callable(value) else patterns).take(name, value)


FILTER = Rule(_filter)


def enable_fp8_all_gather(model: nn.Module, filter: Sequence[str] | Callable[[str], bool] = ()) -> list[str]:  # noqa: A002
    """From the next `fully_shard` on, weights of linear layers travel in FP8. Returns the names of these layers.

    filter: name patterns of layers to leave out (`head`, `layers.0.*`), as those of `Config`; or a callable that is
    true for what to take. Leave out what is left out of FP8 there, too: its weight would be rounded for nothing.

    The scale of a weight is `448 / amax`, of the amax over all shards: that of dynamic scaling, whatever the recipe is.
    Of a weight that tensor parallel divides, before this is called, each part has its own. Raises Fp8Error for a model
    that is sharded already; the first forward does, where `shard_placement_fn` divides such a weight by columns. Raises
    TypeError for what is not a module, and ValueError for a filter that is neither, or a pattern that matches nothing.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"enable_fp8_all_gather() takes a module, not {type(model).__name__}")
    filter = FILTER.take("filter", filter)  # noqa: A001
    if not callable(filter):
        check_models(Config(filter=filter), [model], {}, type(model).__name__)
    chosen = {}
    for name, module in model.named_modules():
        takes = filter(name) if callable(filter) else not any(matches(name, pattern) for pattern in filter)
        if isinstance(module, nn.Linear) and takes:
            if any(isinstance(m, FSDPModule) for m in _around(model, name)):
                raise Fp8Error(f"{name!r} is sharded already: call enable_fp8_all_gather before fully_shard")
            chosen[name] = module
    weights = _Weights(model)
    parts: dict[Tensor, nn.Parameter] = {}
    for name, module in chosen.items():
        old: Tensor = module.weight
        if not isinstance(part_of(old), Fp8Shard) and old not in parts:
            key = weights.new_key(name)
            parts[old] = _parameter_of_shard(old, weights, key)
            after_load = functools.partial(_after_load, weights=weights, key=key)
            module.register_load_state_dict_post_hook(after_load)  # type: ignore[no-untyped-call]
    for other in model.modules():  # an embedding may have one of these weights, too
        for name, parameter in other._parameters.items():
            if parameter is not None and parameter in parts:
                other._parameters[name] = parts[parameter]
    return list(chosen)


def _parameter_of_shard(old: Tensor, weights: _Weights, key: int) -> nn.Parameter:
    return nn.Parameter(on_part(lambda x, _: Fp8Shard(x, weights, key), old.detach()), old.requires_grad)


def _after_load(module: Any, _: Any, *, weights: _Weights, key: int) -> None:
    """`load_state_dict(assign=True)` puts a plain tensor in the place of the parameter, or of its part."""
    weight = module.weight
    if isinstance(part_of(weight), Fp8Shard):
        pass
    elif isinstance(weight, DTensor):
        weight._local_tensor = Fp8Shard(
            weight._local_tensor, weights, key
        )  # FSDP has the parameter, and looks at it next
    else:
        module.weight = _parameter_of_shard(weight, weights, key)
    weights.is_parameter(key, module.weight)


def write_shards(parameters: Iterable[Tensor]) -> None:
    """A training step has changed these, on all ranks: make the FP8 of shards among them that the next one gathers."""
    for weights in dict.fromkeys(s._weights for p in parameters if (s := _shard_of(p)) is not None):
        weights.write()


def _shard_of(parameter: Tensor) -> Fp8Shard | None:
    local = part_of(parameter)
    return local if isinstance(local, Fp8Shard) else None


class _Known(NamedTuple):
    """A weight that has been gathered. mesh: of all shards. change: how many parameters it was before."""

    parameter: weakref.ref[Tensor]
    mesh: DeviceMesh
    change: int


class _Written(NamedTuple):
    """FP8 copies of all shards, by their keys, with the scales that they were made by.

    of: the weights as they were; shards: the tensors.
    """

    of: Any
    copies: dict[int, Tensor]
    scales: dict[int, Tensor]
    shards: dict[int, weakref.ref[Tensor]]


def _around(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """The modules that a module is in, and itself."""
    path = name.split(".") if name else []
    return (model.get_submodule(".".join(path[:i])) for i in range(len(path) + 1))


class _Weights:
    """All weights of a model that travel in FP8, and their scales.

    Whether scales are computed, which is a collective, depends on nothing that is not the same on all ranks: the tensor
    that a shard consists of, say, is not. FSDP makes another one where it has to pad it, behind `load_state_dict`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._known: dict[int, _Known] = {}
        """By key."""
        self.names: list[str] = []
        """Of the layers, by key."""
        self._scales: dict[int, Tensor] = {}
        self._made_of: Any = None
        self._forwards = 0
        self._written: _Written | None = None
        before_eager_optimizers(_forget_all)
        _all.add(self)
        model.register_forward_pre_hook(self._begin_forward)

    def __deepcopy__(self, _: Any) -> _Weights:
        """Itself: Dynamo's guards compare a shard's with a copy that they keep."""
        return self

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin_forward(self, *_: Any) -> None:
        self._forwards += 1

    def new_key(self, name: str) -> int:
        """Of the weight of a layer."""
        self.names.append(name)
        return len(self.names) - 1

    def is_parameter(self, key: int, parameter: Tensor, mesh: DeviceMesh | None = None) -> None:
        """From now on the weight is this one. mesh: where that is known."""
        known = self._known.get(key)
        mesh = mesh or (known.mesh if known else None)
        if mesh is not None and (known is None or known.parameter() is not parameter):
            self._known[key] = _Known(weakref.ref(parameter), mesh, known.change + 1 if known else 0)

    def quantized(self, key: int, parameter: Tensor, x: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
        """A shard in FP8, and its scale f32[]. x: the shard where it is computed with. When any may have changed, the
        scales of all are computed.

        Each forward begins with that, for there are ways to change a parameter of which nothing counts; where forwards
        are not the model's own, versions tell. The backward gathers again, by the scales of the forward. Of what a
        training step has written only what counts can tell that it is not of the weights any more.
        """
        self.is_parameter(key, parameter, mesh)
        written, now = self._written, self._as_they_are()
        if written is not None and written.of == now:
            scale = written.scales[key].to(x.device)
            if written.shards[key]() is _tensor_of(parameter):
                return written.copies[key].to(x.device), scale
        else:
            self._written = None
            if self._made_of != (self._forwards, now):
                self._scales, self._made_of = _scales(self._shards()), (self._forwards, now)
            scale = self._scales[key].to(x.device)
        with torch.no_grad():
            return scaling.quantize(x, scale, scaling.E4M3), scale

    def write(self) -> None:
        """Make the FP8 of all shards. Not before any was gathered: before that nothing is known of them."""
        shards = self._shards()
        if shards:
            scales = _scales(shards)
            with torch.no_grad():
                copies = {k: scaling.quantize(x, scales[k].to(x.device), scaling.E4M3) for k, (x, _) in shards.items()}
            tensors = {k: weakref.ref(x) for k, (x, _) in shards.items()}
            self._written = _Written(self._as_they_are(), copies, scales, tensors)

    def forget(self) -> None:
        """What was written may not be of the weights any more."""
        self._written = None

    def _shards(self) -> _Shards:
        alive = {k: (known.parameter(), known.mesh) for k, known in self._known.items()}
        return {k: (_tensor_of(p), mesh) for k, (p, mesh) in alive.items() if p is not None}

    def _as_they_are(self) -> Any:
        """Equal as long as nobody has changed the parameters in a way that counts."""
        alive = {k: (known.parameter(), known.change) for k, known in self._known.items()}
        return [(k, change, p._version) for k, (p, change) in alive.items() if p is not None]


_Shards = dict[int, tuple[Tensor, DeviceMesh]]
_all: weakref.WeakSet[_Weights] = weakref.WeakSet()


def _tensor_of(parameter: Tensor) -> Tensor:
    shard = _shard_of(parameter)
    assert shard is not None, type(parameter)
    return shard._tensor


def _forget_all(_: torch.optim.Optimizer) -> None:
    """What an optimizer does in `p.data`, no version knows."""
    for weights in _all:
        weights.forget()


def _scales(shards: _Shards) -> dict[int, Tensor]:
    """f32[] of each, by one all-reduce for all that the same ranks have: which is one, unless meshes differ."""
    by_mesh: dict[DeviceMesh, dict[int, Tensor]] = {}
    for key, (x, mesh) in shards.items():
        by_mesh.setdefault(mesh, {})[key] = x
    return {key: scale for mesh, mine in by_mesh.items() for key, scale in _scales_over(mesh, mine).items()}


@torch.no_grad()
def _scales_over(mesh: DeviceMesh, shards: dict[int, Tensor]) -> dict[int, Tensor]:
    """A shard may be empty."""
    device = torch.device(mesh.device_type)
    amaxes = [scaling.amax(x).to(device) if x.numel() else torch.zeros((), device=device) for x in shards.values()]
    amax = amax_over(torch.stack(amaxes), [mesh.get_group().group_name])
    scale = scaling.scale_from_amax(amax, scaling.fp8_max(scaling.E4M3), 1.0)
    scale = torch.where(scaling.is_finite(amax), scale, float("nan"))
    return dict(zip(shards, scale.unbind(0), strict=True))


class _StandIn(Tensor):
    """What computes with other tensors in its place: by `_run`, which each kind has of its own."""

    _run: Any

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """One op, of those."""
        return cls._dispatched(func, args, kwargs or {})

    # in a step that is compiled, Dynamo would take it for code of the user's
    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _dispatched(cls, func: Any, args: Any, kwargs: Any) -> Any:
        return cls._run(func, args, kwargs)


class Fp8Shard(_StandIn):
    """A parameter in high precision, of which FSDP gathers FP8: its ops are those of the tensor that it holds.

    What FSDP makes of it, shards and copies, are such tensors too; what other ops make of it are plain ones.
    """

    _tensor: Tensor
    _weights: _Weights
    _key: int

    @staticmethod
    def __new__(cls, tensor: Tensor, weights: _Weights, key: int) -> Fp8Shard:
        """tensor: f[N, K], on any device."""
        return make_wrapper_subclass(
            cls,
            tensor.size(),
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            layout=tensor.layout,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )

    def __init__(self, tensor: Tensor, weights: _Weights, key: int) -> None:
        self._tensor, self._weights, self._key = tensor, weights, key

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Fp8Shard({self._tensor!r})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """What it consists of, for torch.compile."""
        return ["_tensor"], (self._weights, self._key)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], of: Any, size: Any, stride: Any) -> Fp8Shard:
        """The reverse."""
        return Fp8Shard(inner["_tensor"], *of)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """In a file it is a plain tensor."""
        return self._tensor.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @staticmethod
    def _run(func: Any, args: Any, kwargs: Any) -> Any:
        found = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Fp8Shard)]
        plain = pytree.tree_map_only(Fp8Shard, lambda x: x._tensor, (args, kwargs))
        result = func(*plain[0], **plain[1])
        if func._schema.is_mutable and args and isinstance(args[0], Fp8Shard) and isinstance(result, Tensor):
            return args[0]  # in place
        if func not in _KEEPING:
            return result
        return pytree.tree_map_only(Tensor, lambda x: Fp8Shard(x, found[0]._weights, found[0]._key), result)

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """What FSDP gathers: u8[rows of the largest shard, K], and the scale's inverse. Raises Fp8Error for columns."""
        if self.shape[1:] != outer_size[1:]:
            name = self._weights.names[self._key]
            raise Fp8Error(
                f"the weight of {name!r}, {list(outer_size)}, is sharded as {list(self.shape)}: FP8 is gathered of "
                "shards of rows. Let shard_placement_fn divide dimension 0, or leave the layer out with filter="
            )
        x_q, scale = self._weights.quantized(self._key, self._origin(module), self._tensor, mesh)
        with torch.no_grad():
            x_q = x_q.view(torch.uint8)
            rows = -(-outer_size[0] // mesh.size()) - x_q.shape[0]
            if rows:  # uneven: FSDP wants all shards of one size
                x_q = torch.cat([x_q, x_q.new_zeros(rows, *x_q.shape[1:])])
            return (x_q.contiguous(),), scale.reciprocal()

    def _origin(self, module: nn.Module) -> Tensor:
        """The parameter: with CPU offload, this is a copy of what it consists of."""
        for parameter in module.parameters(recurse=False):
            local = _shard_of(parameter)
            if local is not None and local._key == self._key:
                return parameter
        return self

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], scale_inv: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """What forwards are called with: a `GatheredWeight` in `dtype`; `out` if there is one already."""
        x_q = outputs[0].view(scaling.E4M3)
        if out is None:
            return GatheredWeight(x_q, scale_inv, dtype), (x_q,)
        weight = part_of(out)
        assert isinstance(weight, GatheredWeight), type(weight)
        weight._scale_inv = scale_inv
        return None


_KEEPING = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.view.default,
    aten.as_strided.default,
    aten._to_copy.default,
    aten._pin_memory.default,
}
"""Ops by which FSDP divides and moves parameters."""


class GatheredWeight(_StandIn):
    """A weight f[N, K] that is `dequantize(x_q, scale_inv)` to all that reads it."""

    _x_q: Tensor
    _scale_inv: Tensor

    @staticmethod
    def __new__(cls, x_q: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> GatheredWeight:
        """x_q: f8[N, K]; scale_inv: f32[]; dtype: that of the weight."""
        return make_wrapper_subclass(
            cls,
            x_q.size(),
            strides=x_q.stride(),
            storage_offset=x_q.storage_offset(),
            dtype=dtype,
            device=x_q.device,
            requires_grad=False,
        )

    def __init__(self, x_q: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> None:
        self._x_q, self._scale_inv = x_q, scale_inv

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredWeight({self._x_q!r}, {self._scale_inv!r}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """What it consists of, for torch.compile."""
        return ["_x_q", "_scale_inv"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> GatheredWeight:
        """The reverse."""
        return GatheredWeight(inner["_x_q"], inner["_scale_inv"], dtype)

    @staticmethod
    def _run(func: Any, args: Any, kwargs: Any) -> Any:
        if func in _VIEWS:
            x = args[0]
            return GatheredWeight(func(x._x_q, *args[1:], **kwargs), x._scale_inv, x.dtype)
        args, kwargs = pytree.tree_map_only(GatheredWeight, GatheredWeight._dequantized, (args, kwargs))
        return func(*args, **kwargs)

    @staticmethod
    def _dequantized(x: GatheredWeight) -> Tensor:
        return scaling.dequantize(x._x_q, x._scale_inv, x.dtype)


_VIEWS = {
    aten.detach.default,
    aten.alias.default,
    aten.as_strided.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten.slice.Tensor,
}
"""Ops whose result is in FP8, too: those by which FSDP and autograd hand a parameter on."""
