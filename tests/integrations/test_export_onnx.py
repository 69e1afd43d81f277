"""Test that onnxruntime computes what fp8pass does with static scales."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8pass
from fp8pass.recipes import StaticScaling
from tests.helpers.harness import compiled, without_caches

pytestmark = pytest.mark.compiled


def packages() -> tuple[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("onnxscript")
        return pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64, bias=False), nn.Linear(64, 8)).eval()


@pytest.mark.filterwarnings("ignore")  # of torch.onnx
def test_onnxruntime_computes_the_same(tmp_path: Path) -> None:
    onnx, onnxruntime = packages()
    model, x, file = make(), torch.randn(16, 128), tmp_path / "model.onnx"
    with without_caches(), torch.no_grad():
        recipe = StaticScaling(fp8pass.calibrate(model, [x]))
        run = compiled(model, recipe=recipe, filter=["3"])
        ours = run(x)
        done = fp8pass.export_onnx(run, file, (x,))
    assert list(done.layers) == ["0", "2"]
    graph = onnx.load(file).graph
    ops = [node.op_type for node in graph.node]
    assert (ops.count("QuantizeLinear"), ops.count("DequantizeLinear")) == (2, 4)
    float8 = onnx.TensorProto.FLOAT8E4M3FN
    assert {tuple(i.dims) for i in graph.initializer if i.data_type == float8} == {(256, 128), (64, 256), ()}
    session = onnxruntime.InferenceSession(file)
    theirs = torch.tensor(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
    error = (ours - model(x)).abs().max()
    assert float((theirs - ours).abs().max()) < 0.05 * float(error)


def test_errors(tmp_path: Path) -> None:
    model, x = make(), torch.randn(4, 128)
    with pytest.raises(fp8pass.Fp8Error, match="ONNX quantizes by static scales, and 0 has other scales: pass recipe="):
        fp8pass.export_onnx(model, tmp_path / "m.onnx", (x,), recipe="rowwise")
    scales: dict[str, Tensor] = {f"{i}.{role}": torch.tensor(1.0) for i in (0, 2, 3) for role in ("input", "weight")}
    with pytest.raises(fp8pass.Fp8Error, match=r"the weight of 0 is torch.bfloat16: export model\.float\(\)"):
        fp8pass.export_onnx(model.bfloat16(), tmp_path / "m.onnx", (x,), recipe=StaticScaling(scales))
    with pytest.raises(TypeError, match="takes a module or a compiled module, not int"):
        fp8pass.export_onnx(3, tmp_path / "m.onnx", (x,))
