"""The kernels of bench/fused_matmuls.py in Triton's interpreter, on operands whose products are exact."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.gpu_code

SCRIPT = """
import torch, torch.nn.functional as F
import fused_matmuls as bench
from triton.runtime import interpreter
from unittest import mock
from tests.helpers.triton_on_cpu import convert_float

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
m, n, k = 192, 128, 128  # the rows do not fill the tiles
s, scale, amax = torch.tensor(0.02), torch.tensor(20.0), torch.zeros(64)
options = {"BM": 128, "BN": 64, "BK": 64, "FLAT": False, "PROGRAMS": 3}

def whole(rows, columns, dtype):
    return torch.randint(-2, 3, (rows, columns)).float().to(dtype)

def rounded(x):
    return x.to(BF16).float()

def same(got, wanted, dtype, limit):
    return torch.equal(got.view(torch.uint8), (wanted * scale).clamp(-limit, limit).to(dtype).contiguous().view(torch.uint8))

with mock.patch.object(interpreter, "_convert_float", convert_float):
    x, w, dy, down = whole(m, k, E4M3), whole(2 * n, k, E4M3), whole(m, k, E5M2), whole(n, k, E4M3)
    q, t, both, hp = (torch.empty(shape, dtype=d) for shape, d in (((m, n), E4M3), ((n, m), E4M3), ((m, 2 * n), BF16), ((m, n), BF16)))
    bench.gated[(3,)](x, w, both, q, amax, s, scale, m, n, k, SAVES=True, **options)
    reference = (x.float() @ w.float().t() * s).to(BF16)
    gate, up = reference.float().split(n, 1)
    silu = rounded(F.silu(gate))
    hidden = rounded(silu * up)
    assert torch.equal(both, reference) and same(q, hidden, E4M3, 448) and amax.max() == hidden.abs().max()
    d, dt = torch.empty(m, 2 * n, dtype=E5M2), torch.empty(2 * n, m, dtype=E5M2)
    bench.backward[(3,)](dy, down, both, d, dt, t, amax.zero_(), s, scale, m, n, k, HIDDEN=True, **options)
    of_hidden, sigmoid = rounded(dy.float() @ down.float().t() * s), torch.sigmoid(gate)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    wanted = rounded(torch.cat([rounded(of_hidden * up) * slope, of_hidden * silu], 1))
    assert same(d, wanted, E5M2, 57344) and same(dt, wanted.t(), E5M2, 57344) and same(t, hidden.t(), E4M3, 448)
    assert amax.max() == wanted.abs().max()
    product = rounded(x.float() @ down.float().t() * s)
    for kind, y in enumerate((product, rounded(F.relu(product).square()), rounded(F.gelu(product)))):
        bench.one[(3,)](x, down, hp, q, t, amax.zero_(), s, scale, m, n, k, KIND=kind, **options)
        assert kind == 1 or torch.equal(hp.float(), y), kind
        assert kind == 0 or (same(q, y, E4M3, 448) and same(t, y.t(), E4M3, 448) and amax.max() == y.abs().max()), kind
"""


@pytest.mark.variant
def test_kernels_that_multiply_and_quantize() -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "bench")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
