"""FSDP2 that sends weights in FP8, half the bytes of bfloat16, and gradients in FP8, a quarter of those of float32.

    fp8pass.fsdp.enable_fp8_all_gather(model)          before fully_shard
    for block in model.blocks:
        block.compile(backend="fp8pass")
        fully_shard(block)
    fully_shard(model)
    fp8pass.fsdp.enable_fp8_reduce_scatter(model)      after fully_shard

Each rank quantizes its shard of a weight, and FSDP gathers the bytes. One all-reduce of the amaxes gives the scales of
all weights after the weights have changed: with `fp8pass.train_step` at the end of the step, right after the optimizer,
otherwise when the next forward begins. A compiled graph gets a tensor that every op reads as `dequantize(x_q,
scale_inv)`, so fp8pass finds the matmul as it finds any other. The parameters that optimizers, clipping and checkpoints
see stay in high precision.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fp8pass.base import scaling
from fp8pass.base._torch import ReduceScatter, before_eager_optimizers, make_wrapper_subclass, pytree
from fp8pass.base.errors import Fp8Error
from fp8pass.base.fields import Rule, called_with, choose, several
from fp8pass.options.config import Config
from fp8pass.options.unmatched import check_models
from fp8pass.quant import ops
from fp8pass.quant.sharded import amax_over, on_part, part_of
from fp8pass.quant.wire import GradientExchange, GradientFormat, Groups, groups_of
from fp8pass.quant.wrapper_tensor import Fp8Weight, WrapperTensor
from fp8pass.recipes import BLOCK, BlockwiseScaling, matches

aten = torch.ops.aten


def _filter(name: str, value: Any) -> Any:
    patterns = several("a function (fqn) -> bool, or patterns of names to leave out, ['head', 'layers.0.*']")
    return (called_with(("",), "(fqn)") if callable(value) else patterns).take(name, value)


FILTER = Rule(_filter)


def enable_fp8_all_gather(
    model: nn.Module,
    filter: Sequence[str] | Callable[[str], bool] = (),  # noqa: A002
    scales: str = "tensor",
) -> list[str]:
    """Make the next `fully_shard` gather weights of linear layers in FP8.

    With one scale for each weight, it is `448 / amax`, with the amax over all shards: the scale of dynamic scaling,
    whatever the recipe is. If tensor parallelism has sharded a weight before this call, each shard has its own scale.
    Scales of blocks are gathered with the weight, f32[N / 128, K / 128], and are those of the recipe `blockwise`:
    training computes the same values as without FP8 on the wire.

    Args:
        model: The model, before `fully_shard`.
        filter: Name patterns of layers to leave out (`head`, `layers.0.*`), as in `Config`; or a callable that takes a
            layer's name and returns True for layers to gather in FP8. Leave out layers that `Config` leaves out, too:
            their weights would be rounded without a benefit.
        scales: The part of a weight with one scale: "tensor" for the recipes `delayed` and `dynamic`, "block" for
            `blockwise`, whose blocks have 128 rows and columns. Weights are e4m3.

    Returns:
        The names of the layers whose weights are gathered in FP8.

    Raises:
        Fp8Error: If the model is sharded already. The first forward raises it if `shard_placement_fn` shards such a
            weight by columns; or with "block", if 128 does not divide a rank's rows and the columns.
        TypeError: If `model` is not a module.
        ValueError: If `filter` is neither patterns nor a callable, or a pattern matches nothing; for other `scales`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"enable_fp8_all_gather() takes a module, not {type(model).__name__}")
    filter = FILTER.take("filter", filter)  # noqa: A001
    choose("scales", scales, ("tensor", "block"))
    if not callable(filter):
        check_models(Config(filter=filter), [model], {}, type(model).__name__)
    chosen = {}
    for name, module in model.named_modules():
        takes = filter(name) if callable(filter) else not any(matches(name, pattern) for pattern in filter)
        if isinstance(module, nn.Linear) and takes:
            if any(isinstance(m, FSDPModule) for m in _around(model, name)):
                raise Fp8Error(f"{name!r} is sharded already: call enable_fp8_all_gather before fully_shard")
            chosen[name] = module
    weights = _Weights(model, in_blocks=scales == "block")
    # tensors as keys: their hash is their id, and Python compares identities before it would call `==`
    parts: dict[Tensor, nn.Parameter] = {}
    for name, module in chosen.items():
        old: Tensor = module.weight
        # layers that share a weight share its key
        if not isinstance(part_of(old), Fp8Shard) and old not in parts:
            key = weights.new_key(name)
            parts[old] = _parameter_of_shard(old, weights, key)
            after_load = functools.partial(_after_load, weights=weights, key=key)
            module.register_load_state_dict_post_hook(after_load)  # type: ignore[no-untyped-call]
    for other in model.modules():  # an embedding may share one of these weights
        for name, parameter in other._parameters.items():
            if parameter is not None and parameter in parts:
                other._parameters[name] = parts[parameter]
    return list(chosen)


def _parameter_of_shard(old: Tensor, weights: _Weights, key: int) -> nn.Parameter:
    return nn.Parameter(on_part(lambda x, _: Fp8Shard(x, weights, key), old.detach()), old.requires_grad)


def _after_load(module: Any, _: Any, *, weights: _Weights, key: int) -> None:
    """Wrap the weight again after `load_state_dict(assign=True)`, which replaces the shard by a plain tensor."""
    weight = module.weight
    if isinstance(part_of(weight), Fp8Shard):
        pass
    elif isinstance(weight, DTensor):
        # in place: FSDP holds this parameter, and resets its shards from it after the load
        weight._local_tensor = Fp8Shard(weight._local_tensor, weights, key)
    else:
        module.weight = _parameter_of_shard(weight, weights, key)
    weights.is_parameter(key, module.weight)


def enable_fp8_reduce_scatter(
    model: nn.Module,
    *,
    dtype: str = "e4m3",
    scale: str = "own",
    block: int = 1024,
    margin: int = 1,
    node: int | None = None,
) -> list[str]:
    """Let FSDP2 send gradients in FP8: each rank gets its parts from all ranks, and sums them in float32.

    The means differ from those of float32 by at most the first term of the bound of `fp8pass.ddp.fp8_gradients`; the
    sums are not quantized. With a mesh of two dimensions, the all-reduce between replicas stays in high precision.
    Works with and without `enable_fp8_all_gather`.

    Args:
        model: The model, after `fully_shard`. All FSDP modules in it are changed.
        dtype: "e4m3" or "e5m2".
        scale: As in `fp8_gradients`; what is a bucket there are the gradients of one FSDP module here.
        block: Number of gradients that share a scale with "own".
        margin: Powers of two by which gradients may grow with "delayed".
        node: The ranks of a node, which exchange first, as in `fp8_gradients`; None: one exchange among all ranks.

    Returns:
        The names of the FSDP modules.

    Raises:
        Fp8Error: If no module is sharded; or in the backward, if `node` does not divide the ranks, or if a divide
            factor is set that this does not support.
        TypeError: If `model` is not a module.
        ValueError: For invalid options; from torch, if an FSDP module shards its parameters over several meshes.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"enable_fp8_reduce_scatter() takes a module, not {type(model).__name__}")
    how = GradientFormat(dtype, scale, block, margin, node)
    sharded_modules = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    if not sharded_modules:
        raise Fp8Error("no module is sharded: call enable_fp8_reduce_scatter after fully_shard")
    for module in sharded_modules.values():
        module.set_custom_reduce_scatter(_Fp8ReduceScatter(how))
    return list(sharded_modules)


class _Fp8ReduceScatter(ReduceScatter):
    """The reduce-scatter of one FSDP module."""

    def __init__(self, how: GradientFormat) -> None:
        self._exchange = GradientExchange(how)

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new tensor, for FSDP's gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Write this rank's part of the sum or mean of all ranks' gradients to `output_tensor` [n].

        input_tensor: [ranks * n], the gradients of this rank. FSDP calls it on a separate stream, where the
        collectives wait for each other; the host waits for none.
        """
        if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise Fp8Error(
                "enable_fp8_reduce_scatter computes sums and means: after set_gradient_divide_factor, call "
                "set_force_sum_reduction_for_comms(True) on the same module"
            )
        ranks = group.size()
        groups = _groups_of(group, self._exchange.how.node, input_tensor.device)
        total = self._exchange.reduce_scatter(input_tensor.view(ranks, -1), groups, input_tensor.numel())
        output_tensor.copy_(total / ranks if op == dist.ReduceOp.AVG else total)


@functools.cache
def _groups_of(group: dist.ProcessGroup, node: int | None, device: torch.device) -> Groups:
    """Return the groups of `groups_of`, which are the same for all FSDP modules of a mesh."""
    return groups_of(group, node, device)


def write_shards(parameters: Iterable[Tensor]) -> None:
    """Quantize the shards among these parameters, which a training step has changed on all ranks, for the next step."""
    if len(_all):
        for weights in dict.fromkeys(s._weights for p in parameters if (s := _shard_of(p)) is not None):
            weights.write()


def _shard_of(parameter: Tensor) -> Fp8Shard | None:
    local = part_of(parameter)
    return local if isinstance(local, Fp8Shard) else None


class _KnownWeight(NamedTuple):
    """A gathered weight. mesh: the mesh of its shards. change: how often its parameter was replaced."""

    parameter: weakref.ref[Tensor]
    mesh: DeviceMesh
    change: int


class _ShardCopies(NamedTuple):
    """FP8 copies of all shards, with the scales that they were quantized with, by key.

    made_of: the value of `_Weights._as_they_are` when they were quantized; shards: the tensors that were quantized.
    """

    made_of: Any
    copies: dict[int, Tensor]
    scales: dict[int, Tensor]
    shards: dict[int, weakref.ref[Tensor]]


def _around(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """Return the modules that contain the module `name`, outermost first, and the module itself."""
    path = name.split(".") if name else []
    return (model.get_submodule(".".join(path[:i])) for i in range(len(path) + 1))


class _Weights:
    """All weights of a model that are gathered in FP8, and their scales.

    Computing scales is a collective, so the decision to compute them uses only what is the same on all ranks. The
    identity of a shard's tensor is not: after `load_state_dict`, FSDP makes a new tensor on ranks that pad their shard.
    """

    def __init__(self, model: nn.Module, in_blocks: bool = False) -> None:
        self.in_blocks = in_blocks
        """True if each block has a scale: then a rank quantizes its shard without knowing the others."""
        self._known: dict[int, _KnownWeight] = {}
        """{key: the weight}."""
        self.names: list[str] = []
        """Names of the layers; a weight's key is its layer's index here."""
        self._scales: dict[int, Tensor] = {}
        self._made_of: Any = None
        self._forwards = 0
        self._written: _ShardCopies | None = None
        before_eager_optimizers(_forget_all)
        _all.add(self)
        model.register_forward_pre_hook(self._begin_forward)

    def __deepcopy__(self, _: Any) -> _Weights:
        """Return itself: Dynamo's guards keep a copy of a subclass's metadata, and compare it with the shard's."""
        return self

    # if Dynamo traced this, it would guard on the value of `_forwards`, which each forward changes
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin_forward(self, *_: Any) -> None:
        self._forwards += 1

    def new_key(self, name: str) -> int:
        """Return a new key for the weight of the layer `name`."""
        self.names.append(name)
        return len(self.names) - 1

    def is_parameter(self, key: int, parameter: Tensor, mesh: DeviceMesh | None = None) -> None:
        """Set the parameter that the weight of this key is now. mesh: the mesh of its shards, None if not known."""
        before = self._known.get(key)
        mesh = mesh or (before.mesh if before else None)
        if mesh is not None and (before is None or before.parameter() is not parameter):
            self._known[key] = _KnownWeight(weakref.ref(parameter), mesh, before.change + 1 if before else 0)

    def quantized(self, key: int, parameter: Tensor, x: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
        """Return a shard in FP8, and its scale f32[]; compute the scales of all weights if any may have changed.

        x: the shard on the device that computes, which is a copy with CPU offload.

        Each forward of the model computes the scales, because some changes of a parameter do not bump its version
        counter; if submodules are called without the model's forward, only version counters show a change. The backward
        gathers again, with the scales of the forward. FP8 shards that `write` prepared are dropped only if a version
        counter changes, a parameter is replaced, or an optimizer runs eagerly.
        """
        self.is_parameter(key, parameter, mesh)
        written, now = self._written, self._as_they_are()
        if written is not None and written.made_of == now:
            scale = written.scales[key].to(x.device)
            # otherwise FSDP has made a new tensor of this shard, on this rank alone: its scale is that of `write`, all
            # the same
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
        """Quantize all shards for the next step, if that takes a reduction of their amaxes.

        Does nothing before the first all-gather: no parameter is known.
        """
        shards = {} if self.in_blocks else self._shards()
        if shards:
            scales = _scales(shards)
            with torch.no_grad():
                copies = {k: scaling.quantize(x, scales[k].to(x.device), scaling.E4M3) for k, (x, _) in shards.items()}
            tensors = {k: weakref.ref(x) for k, (x, _) in shards.items()}
            self._written = _ShardCopies(self._as_they_are(), copies, scales, tensors)

    def forget(self) -> None:
        """Drop the FP8 shards that `write` prepared, because the weights may have changed."""
        self._written = None

    def _shards(self) -> _Shards:
        alive = {k: (weight.parameter(), weight.mesh) for k, weight in self._known.items()}
        return {k: (_tensor_of(p), mesh) for k, (p, mesh) in alive.items() if p is not None}

    def _as_they_are(self) -> Any:
        """Return a value that stays equal until a parameter is replaced or its version counter changes."""
        alive = {k: (weight.parameter(), weight.change) for k, weight in self._known.items()}
        return [(k, change, p._version) for k, (p, change) in alive.items() if p is not None]


_Shards = dict[int, tuple[Tensor, DeviceMesh]]
_all: weakref.WeakSet[_Weights] = weakref.WeakSet()


def _tensor_of(parameter: Tensor) -> Tensor:
    shard = _shard_of(parameter)
    assert shard is not None, type(parameter)
    return shard._tensor


def _forget_all(_: torch.optim.Optimizer) -> None:
    """Drop all prepared FP8 shards before an eager optimizer step: writes to `p.data` bump no version counter."""
    for weights in _all:
        weights.forget()


def _scales(shards: _Shards) -> dict[int, Tensor]:
    """Return the scale f32[] of each weight, by key, with one all-reduce for each mesh."""
    by_mesh: dict[DeviceMesh, dict[int, Tensor]] = {}
    for key, (x, mesh) in shards.items():
        by_mesh.setdefault(mesh, {})[key] = x
    return {key: scale for mesh, of_mesh in by_mesh.items() for key, scale in _scales_over(mesh, of_mesh).items()}


@torch.no_grad()
def _scales_over(mesh: DeviceMesh, shards: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return the scale f32[] of each weight of one mesh, by key, with one all-reduce. Empty shards count as amax 0."""
    device = torch.device(mesh.device_type)
    amaxes = [scaling.amax(x).to(device) if x.numel() else torch.zeros((), device=device) for x in shards.values()]
    amax = amax_over(torch.stack(amaxes), [mesh.get_group().group_name])
    scale = scaling.scale_from_amax(amax, scaling.fp8_max(scaling.E4M3), 1.0)
    # the scale_inv is NaN, too, and with it the whole weight, as by `inverse_unless_nonfinite`
    scale = torch.where(scaling.is_finite(amax), scale, float("nan"))
    return dict(zip(shards, scale.unbind(0), strict=True))


class Fp8Shard(WrapperTensor):
    """A parameter in high precision that FSDP gathers in FP8. Ops run on the tensor that it holds.

    The ops that FSDP uses to shard and copy parameters return tensors of this class; other ops return plain tensors.
    """

    _tensor: Tensor
    _weights: _Weights
    _key: int

    @staticmethod
    def __new__(cls, tensor: Tensor, weights: _Weights, key: int) -> Fp8Shard:
        """Make the wrapper, without memory for its values. tensor: f[N, K], on any device."""
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
        """Return the name of the inner tensor's attribute, and the metadata: torch.compile's subclass protocol."""
        return ["_tensor"], (self._weights, self._key)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], metadata: Any, size: Any, stride: Any) -> Fp8Shard:
        """Rebuild the tensor from the parts that `__tensor_flatten__` named."""
        return Fp8Shard(inner["_tensor"], *metadata)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the plain tensor, which loads without fp8pass."""
        return self._tensor.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @staticmethod
    def _run(func: Any, args: Any, kwargs: Any) -> Any:
        shards = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Fp8Shard)]
        plain = pytree.tree_map_only(Fp8Shard, lambda x: x._tensor, (args, kwargs))
        result = func(*plain[0], **plain[1])
        if func._schema.is_mutable and args and isinstance(args[0], Fp8Shard) and isinstance(result, Tensor):
            return args[0]  # an in-place op returns its first argument
        if func not in _KEEPING:
            return result
        return pytree.tree_map_only(Tensor, lambda x: Fp8Shard(x, shards[0]._weights, shards[0]._key), result)

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Return the tensor for FSDP to gather, u8[rows of the largest shard, K], and its scale_inv f32[].

        With scales of blocks, these are gathered too: f32[rows / 128, K / 128]. FSDP2 calls it before each all-gather.
        Raises Fp8Error if the weight is sharded by columns, or if blocks don't divide a shard.
        """
        name = self._weights.names[self._key]
        if self.shape[1:] != outer_size[1:]:
            raise Fp8Error(
                f"the weight of {name!r}, {list(outer_size)}, is sharded as {list(self.shape)}: FP8 gathers "
                "shards of rows only. Let shard_placement_fn shard dimension 0, or leave the layer out with filter="
            )
        if self._weights.in_blocks:
            return self._blocks(name, outer_size, mesh), None
        x_q, scale = self._weights.quantized(self._key, self._origin(module), self._tensor, mesh)
        with torch.no_grad():
            # as bytes: gloo gathers no FP8, and FSDP sends a group of parameters as bytes only if their dtypes differ
            x_q = x_q.view(torch.uint8)
            rows = -(-outer_size[0] // mesh.size()) - x_q.shape[0]
            if rows:  # an uneven last shard: FSDP's all-gather takes shards of one size
                x_q = torch.cat([x_q, x_q.new_zeros(rows, *x_q.shape[1:])])
            return (x_q.contiguous(),), scale.reciprocal()

    @torch.no_grad()
    def _blocks(self, name: str, whole: torch.Size, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
        """Return this shard u8[n, K], and the scale_inv of its blocks. whole: the size of the weight."""
        if whole[0] % (mesh.size() * BLOCK) or whole[1] % BLOCK:
            raise Fp8Error(
                f"the weight of {name!r}, {list(whole)}, has no whole blocks of {BLOCK} rows and columns on each of "
                f"{mesh.size()} ranks: leave the layer out with enable_fp8_all_gather(filter=)"
            )
        x_q, scale_inv = ops.Blockwise(BlockwiseScaling(), scaling.E4M3, BLOCK, square=True).parts(self._tensor)
        return x_q.view(torch.uint8), scale_inv

    def _origin(self, module: nn.Module) -> Tensor:
        """Return the parameter that this shard belongs to: with CPU offload, this shard is a copy on the GPU."""
        for parameter in module.parameters(recurse=False):
            local = _shard_of(parameter)
            if local is not None and local._key == self._key:
                return parameter
        return self

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], scale_inv: Tensor | None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """Return a `GatheredWeight` of `dtype`, which forwards are called with, and its tensors for FSDP to free.

        scale_inv: None if it is among the outputs. From the second all-gather on, FSDP passes the earlier weight as
        `out`, and has filled its gathered tensors: set its scale_inv, if it was not gathered, and return None.
        """
        x_q = outputs[0].view(scaling.E4M3)
        if out is None:
            gathered = (x_q, *outputs[1:])
            return GatheredWeight(x_q, outputs[1] if scale_inv is None else scale_inv, dtype), gathered
        if scale_inv is None:
            return None
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
"""Ops that FSDP uses to shard, copy and move parameters: their results are `Fp8Shard`, too."""


class GatheredWeight(Fp8Weight):
    """A gathered weight f[N, K] that every op reads as its dequantized value.

    scale_inv: f32[], or f32[N / 128, K / 128] of blocks.
    """

    is_frozen = False

    @staticmethod
    def _run(func: Any, args: Any, kwargs: Any) -> Any:
        # a view of blocks may cut or transpose them
        if func in (_VIEWS if args[0].__class__ is GatheredWeight and args[0].scales == "tensor" else _OF_WHOLE):
            x = args[0]
            x_q = func(x._x_q, *args[1:], **kwargs)
            if x.scales == "tensor" or (x_q.shape, x_q.stride()) == (x.shape, x.stride()):
                return GatheredWeight(x_q, x._scale_inv, x.dtype)
        args, kwargs = pytree.tree_map_only(GatheredWeight, GatheredWeight.dequantized, (args, kwargs))
        return func(*args, **kwargs)


_OF_WHOLE = {aten.detach.default, aten.alias.default, aten.as_strided.default, aten.view.default}
"""View ops that may return all of a tensor as it is."""
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
"""View ops whose result stays in FP8: FSDP and autograd apply them to a parameter that they pass on."""
