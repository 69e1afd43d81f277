"""Test `fp8pass.export_fp8`: the weights written against the FP8 operands that graphs multiply, and the folder."""

from __future__ import annotations

import functools
import json
import logging
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, fx, nn

import fp8pass
from fp8pass.base._torch import make_boxed_func
from fp8pass.compiler import eager
from fp8pass.hardware import scales_rows, why_emulated
from fp8pass.recipes import BlockwiseScaling, DelayedScaling, DynamicScaling, RowwiseScaling, StaticScaling
from fp8pass.weights.weight_cache import weights_of
from tests.helpers import oracle
from tests.helpers.harness import compiled, without_caches

E4M3 = torch.float8_e4m3fn
pytestmark = [pytest.mark.compiled, pytest.mark.filterwarnings("ignore:fp8pass. blockwise kernels exist:UserWarning")]


class Net(nn.Module):
    """Two layers whose results are added, which may be merged, and one after them; an odd one for blocks of 128."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(128, 256), nn.Linear(128, 256)
        self.down, self.odd = nn.Linear(256, 128), nn.Linear(128, 48)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.odd(self.down(self.up(x) * self.gate(x).sigmoid()))
        return y


class Operands(fx.Interpreter):
    """Runs a graph, and keeps all of its tensors in e4m3, and the scales that `_scaled_mm` gets for them."""

    seen: ClassVar[list[Tensor]] = []
    scales: ClassVar[list[tuple[Tensor, Tensor]]] = []

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor) and result.dtype is E4M3:
            self.seen.append(result.clone())
        if n.target is torch.ops.aten._scaled_mm.default:
            _, b, _, scale_b = (self.env[a].clone() for a in n.args[:4])  # type: ignore[index]
            self.scales.append((b, scale_b))
        return result


@contextmanager
def capturing() -> Iterator[None]:
    """Let graphs that are compiled in this context, op by op, run by `Operands`."""

    def run(module: fx.GraphModule) -> Any:
        placeholders = module.graph.find_nodes(op="placeholder")
        replaced = {placeholders.index(n.args[0]) for n in module.graph.nodes if eager._replaces_input(n)}
        return make_boxed_func(functools.partial(eager._run_unseen, Operands(module).run, replaced))

    with mock.patch.object(eager, "op_by_op", run):
        yield


def train(model: nn.Module, run: Callable[..., Any], steps: int = 3, dtype: torch.dtype = torch.float32) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)  # amaxes of weights grow in each step
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        run(torch.randn(128, 128, generator=generator).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


def quantization(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def multiplied(model: nn.Module, run: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
    """Return the e4m3 tensors of the next training forward."""
    Operands.seen.clear()
    Operands.scales.clear()
    run(torch.randn(128, 128).to(dtype))
    return list(Operands.seen)


BF16, F32 = torch.bfloat16, torch.float32
CASES: list[tuple[Any, torch.dtype]] = [
    (BlockwiseScaling(), F32),
    (RowwiseScaling(), BF16),
    (DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent", margin=1), F32),
]
VARIANTS: list[tuple[Any, torch.dtype]] = [
    (BlockwiseScaling(), BF16),
    (RowwiseScaling(power_of_2=False, high_precision=("grad_weight",)), F32),
    (DynamicScaling(), BF16),
    (DynamicScaling(power_of_2=True), F32),
    (DelayedScaling(), BF16),
]


@pytest.mark.parametrize(
    ("recipe", "dtype"), [*CASES, *(pytest.param(*case, marks=pytest.mark.variant) for case in VARIANTS)], ids=repr
)
def test_weights_are_those_that_the_next_forward_multiplies(recipe: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    model = Net().to(dtype)
    with without_caches(), capturing():
        run = compiled(model, recipe=recipe)
        train(model, run, dtype=dtype)
        done = fp8pass.export_fp8(run, tmp_path / "out")
        seen = multiplied(model, run, dtype)
    in_blocks, by_rows = isinstance(recipe, BlockwiseScaling), isinstance(recipe, RowwiseScaling)
    cpu = torch.device("cpu")
    has_kernel = dtype is BF16 and scales_rows(cpu, None)
    is_emulated = why_emulated(cpu, E4M3, E4M3) != ""  # then no matmul takes scales
    assert set(done.layers) == {"up", "gate", "down", *(() if in_blocks else ("odd",))}
    written = tensors(tmp_path / "out")
    for path in done.layers:
        x_q = written[f"{path}.weight"]
        assert x_q.dtype is E4M3
        same = [x for x in seen if {*x.shape} == {*x_q.shape} and any(_equal(x_q, y) for y in (x, x.t()))]
        assert same, path
        if not is_emulated and not in_blocks and (not by_rows or has_kernel):
            scales = [s for b, s in Operands.scales if b.t().shape == x_q.shape and _equal(b.t(), x_q)]
            assert any(torch.equal(s.flatten(), written[f"{path}.weight_scale"].flatten()) for s in scales), path
    for name, x in model.state_dict().items():
        assert name in written
        if name.removesuffix(".weight") not in done.layers:
            assert written[name].dtype is dtype and torch.equal(written[name], x), name


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("recipe", ["dynamic", pytest.param("delayed", marks=pytest.mark.variant)])
def test_layers_that_training_merges_share_a_scale(recipe: str, tmp_path: Path) -> None:
    model = Net()
    with torch.no_grad():
        model.gate.weight.mul_(8)
    with without_caches(), capturing():
        run = compiled(model, recipe=recipe, merge_siblings=True)
        train(model, run)
        fp8pass.export_fp8(model, tmp_path / "out")
        seen = multiplied(model, run, torch.float32)
    written = tensors(tmp_path / "out")
    assert torch.equal(written["up.weight_scale"], written["gate.weight_scale"])
    both = torch.cat([bits(written[f"{name}.weight"]) for name in ("up", "gate")])
    assert any(torch.equal(both, bits(x)) for x in seen if x.shape == both.shape)


@pytest.mark.variant
def test_under_autocast_weights_are_quantized_from_float32(tmp_path: Path) -> None:
    model = Net()
    with without_caches(), capturing(), torch.autocast("cpu", torch.bfloat16):
        run = compiled(model, recipe="rowwise")
        train(model, run)
        fp8pass.export_fp8(model, tmp_path / "out")
        seen = multiplied(model, run, torch.float32)
    x_q = tensors(tmp_path / "out")["down.weight"]
    assert any(_equal(x_q, x) or _equal(x_q, x.t()) for x in seen)


def test_a_step_s_fp8_copies_are_the_weights_written(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @fp8pass.train_step(recipe="delayed", lowering="eager", weight_cache="fp8")
    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    with without_caches():
        for _ in range(3):
            step(torch.randn(32, 128))
        fp8pass.export_fp8(model, tmp_path / "out")
    written = tensors(tmp_path / "out")
    copies = {id(w.parts[0]): w.x_q for w in weights_of(list(model.parameters()))}
    for path in ("up", "gate", "down", "odd"):
        assert _equal(written[f"{path}.weight"], copies[id(model.get_submodule(path).weight)]), path


def test_static_scales_of_inputs_are_written(tmp_path: Path) -> None:
    model, x = Net().eval(), torch.randn(16, 128)
    with without_caches():
        scales = fp8pass.calibrate(model, [x])
        run = compiled(model, recipe=StaticScaling(scales))
        with torch.no_grad():
            expected = run(x)
        fp8pass.export_fp8(model, tmp_path / "out")
    written = tensors(tmp_path / "out")
    group = quantization(tmp_path / "out")["config_groups"]["group_0"]
    assert group["input_activations"]["dynamic"] is False and group["input_activations"]["strategy"] == "tensor"

    def layer(path: str, x: Tensor) -> Tensor:
        of = {name: written[f"{path}.{name}"] for name in ("weight", "weight_scale", "input_scale", "bias")}
        x_q = (x / of["input_scale"]).clamp(-448, 448).to(E4M3).double() * of["input_scale"].double()
        y = x_q @ (of["weight"].double() * of["weight_scale"].double()).t() + of["bias"]
        return y.float()

    up, gate = layer("up", x), layer("gate", x)
    torch.testing.assert_close(layer("odd", layer("down", up * gate.sigmoid())), expected, rtol=0.02, atol=0.01)
    for path in ("up", "odd"):
        assert float(written[f"{path}.input_scale"]) == float(1 / scales[f"{path}.input"].float())


def test_by_recipe_without_training(tmp_path: Path) -> None:
    model = Net().bfloat16()
    done = fp8pass.export_fp8(model, tmp_path / "out", recipe={"odd": None, "d*": "dynamic", "*": "rowwise"})
    assert done.layers == {"up": "rowwise", "gate": "rowwise", "down": "dynamic"}
    groups = quantization(tmp_path / "out")["config_groups"]
    assert [group["targets"] for group in groups.values()] == [["up", "gate"], ["down"]]
    assert quantization(tmp_path / "out")["ignore"] == ["odd"]
    written, weight = tensors(tmp_path / "out"), model.down.weight.detach().double()
    expected = oracle.qdq(weight, oracle.scale_of(float(weight.abs().max()), "e4m3"), "e4m3")
    got = written["down.weight"].double() * written["down.weight_scale"].double()
    torch.testing.assert_close(got, expected.double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        written["up.weight"].double() * written["up.weight_scale"].double(),
        oracle.qdq_rows(model.up.weight.detach().double(), 1).double(),
        rtol=1e-6,
        atol=0,
    )


def test_a_loaded_state_gives_the_scales_of_a_model_that_has_not_run(tmp_path: Path) -> None:
    trained, loaded = Net(), Net()
    with without_caches():
        train(trained, compiled(trained))
        fp8pass.export_fp8(trained, tmp_path / "a")
        loaded.load_state_dict(trained.state_dict())
        fp8pass.state(loaded).load_state_dict(fp8pass.state(trained).state_dict())
        fp8pass.export_fp8(loaded, tmp_path / "b")
    a, b = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert a.keys() == b.keys() and all(torch.equal(bits(a[k]), bits(b[k])) for k in a)
    saved = {
        **fp8pass.state(trained).state_dict(),
        "recipe": torch.tensor([*b"DelayedScaling(margin=2)"], dtype=torch.uint8),
    }
    other = Net()
    fp8pass.state(other).load_state_dict(saved)
    with pytest.raises(fp8pass.Fp8Error, match=r"was saved under DelayedScaling\(margin=2\): pass that as recipe="):
        fp8pass.export_fp8(other, tmp_path / "c")


def test_blocks_compiled_one_by_one_are_known_although_they_share_code(tmp_path: Path) -> None:
    model = nn.Sequential(Block(), Block())
    with without_caches():
        for block in model:
            block.compile(backend="fp8pass", options={"recipe": "rowwise", "lowering": "eager"})
        model(torch.randn(16, 128)).sum().backward()
    assert list(fp8pass.export_fp8(model, tmp_path / "out").layers) == ["0.a", "1.a"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        return y


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 128), nn.Linear(128, 64, bias=False)
        self.a, self.b = nn.Linear(128, 128), nn.Linear(128, 128)
        self.head.weight = self.embedding.weight
        self.b.weight = self.a.weight

    def forward(self, i: Tensor) -> Tensor:
        y: Tensor = self.head(self.b(self.a(self.embedding(i))))
        return y


def test_tied_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Tied()
    with without_caches():
        compiled(model)(torch.arange(32)).sum().backward()  # the slot of `a` and `b` has one name
        with caplog.at_level(logging.WARNING, "fp8pass"):
            done = fp8pass.export_fp8(model, tmp_path / "out")
    assert list(done.layers) == ["a", "b"]
    assert "head is exported in high precision: it shares its weight with embedding (Embedding)" in caplog.text
    written = tensors(tmp_path / "out")
    assert torch.equal(bits(written["a.weight"]), bits(written["b.weight"]))
    assert torch.equal(written["head.weight"], model.head.weight) and quantization(tmp_path / "out")["ignore"] == [
        "head"
    ]


def test_files_by_size(tmp_path: Path) -> None:
    model = Net()
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fp8pass.export_fp8(model, whole, recipe="rowwise")
    fp8pass.export_fp8(model, parts, recipe="rowwise", max_shard_size="40KB")
    files = sorted(f.name for f in parts.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-0000{len(files)}.safetensors" and len(files) > 1
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    a, b = tensors(whole), tensors(parts)
    assert a.keys() == b.keys() and all(torch.equal(bits(a[k]), bits(b[k])) for k in a)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in a.values())
    for name, file in index["weight_map"].items():
        assert name in load_file(parts / file)
    assert all(f.stat().st_size < 40_000 + 4096 for f in parts.glob("*.safetensors"))


def test_a_directory_that_exists(tmp_path: Path) -> None:
    model, out = Net(), tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="exists: pass another directory, or overwrite=True"):
        fp8pass.export_fp8(model, out, recipe="rowwise")
    assert [f.name for f in out.iterdir()] == ["mine.txt"]
    fp8pass.export_fp8(model, out, recipe="rowwise", overwrite=True)
    assert sorted(f.name for f in out.iterdir()) == ["config.json", "model.safetensors"]
    assert [f.name for f in tmp_path.iterdir()] == ["out"]
    with pytest.raises(FileExistsError, match=r"model\.safetensors is a file"):
        fp8pass.export_fp8(model, out / "model.safetensors", recipe="rowwise", overwrite=True)


def test_without_safetensors(tmp_path: Path) -> None:
    without = mock.patch("importlib.util.find_spec", return_value=None)
    with without, pytest.raises(fp8pass.Fp8Error, match=r"pip install fp8pass\[export\]"):
        fp8pass.export_fp8(Net(), tmp_path / "out", recipe="rowwise")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_disk_that_fills_leaves_nothing(tmp_path: Path, overwrite: bool) -> None:
    """A limit on the size of files fails as a full disk does: in the middle of a write."""
    out = tmp_path / "out"
    if overwrite:
        fp8pass.export_fp8(Net(), out, recipe="rowwise")
    before = {f.name: f.read_bytes() for f in out.iterdir()} if overwrite else {}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(fp8pass.Fp8Error, match=r"could not be written: .*Nothing of it is left"):
            fp8pass.export_fp8(Net(), out, recipe="rowwise", overwrite=overwrite)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [f.name for f in tmp_path.iterdir()] == (["out"] if overwrite else [])
    assert {f.name: f.read_bytes() for f in out.iterdir()} == before if overwrite else not out.exists()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.w = nn.Linear(128, 128), nn.Parameter(torch.randn(4, 128, 128))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).view(4, -1, 128) @ self.w


def test_what_can_not_be_exported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out, model = tmp_path / "out", nn.Sequential(Experts())
    with caplog.at_level(logging.WARNING, "fp8pass"):
        done = fp8pass.export_fp8(model, out, recipe="rowwise")
    assert "0 is exported in high precision: it is a Experts, and the formats hold only nn.Linear" in caplog.text
    assert list(done.layers) == ["0.up"] and tensors(out)["0.w"].dtype is torch.float32
    assert "1 of 2 layers in FP8 (rowwise)\n0 stays in high precision: it is a Experts" in str(done)
    with pytest.raises(fp8pass.Fp8Error, match="strict: 1 layers can't be exported in FP8: 0: it is a Experts"):
        fp8pass.export_fp8(model, tmp_path / "b", recipe="rowwise", strict=True)


def test_errors(tmp_path: Path) -> None:
    out, model = tmp_path / "out", Net()
    with pytest.raises(fp8pass.Fp8Error, match="has not seen this Net run"):
        fp8pass.export_fp8(model, out)
    with pytest.raises(fp8pass.Fp8Error, match=r"no slot up\.weight: delayed scales come from training"):
        fp8pass.export_fp8(model, out, recipe="delayed")
    with pytest.raises(fp8pass.Fp8Error, match="no layer can be exported in FP8: up: recipe 'mxfp8' has scales"):
        fp8pass.export_fp8(model, out, recipe="mxfp8")
    with pytest.raises(fp8pass.Fp8Error, match="up is scaled in blocks and down is not"):
        fp8pass.export_fp8(model, out, recipe={"up": "blockwise", "down": "rowwise"})
    with pytest.raises(ValueError, match=r"leave_out='head' matches no layer; there are up, gate, down, odd"):
        fp8pass.export_fp8(model, out, recipe="rowwise", leave_out="head")
    with pytest.raises(ValueError, match="max_shard_size is '5 apples'"):
        fp8pass.export_fp8(model, out, recipe="rowwise", max_shard_size="5 apples")
    with pytest.raises(ValueError, match="pass the recipe of the phase"):
        fp8pass.export_fp8(model, out, recipe=fp8pass.recipes.Schedule({0: "rowwise"}))
    with pytest.raises(TypeError, match="takes a module or a compiled module, not function"):
        fp8pass.export_fp8(train, out)
    with torch.no_grad():
        model.down.weight[3, 4] = float("nan")
    with pytest.raises(fp8pass.Fp8Error, match="the weight of down holds NaN or inf"):
        fp8pass.export_fp8(model, out, recipe="rowwise")
    assert not list(tmp_path.iterdir())


def test_verdicts_of_training_select_the_layers(tmp_path: Path) -> None:
    model = Net()
    with without_caches():
        run = compiled(model, recipe="rowwise", filter=lambda fqn, m, k, n: n > 64)
        train(model, run)
        done = fp8pass.export_fp8(model, tmp_path / "out", leave_out=["gate"])
    assert list(done.layers) == ["up", "down"] and done.kept["gate"] == "leave_out names it"
    assert "filter" in done.kept["odd"]
