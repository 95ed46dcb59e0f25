"""Few rows at once: the same product by another way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dflash import smallrows
from dflash.smallrows import MOST_ROWS, SmallRowsLinear, has_kernels, small_linear, use_small_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(24,), (1, 24), (2, 24), (1, 5, 24), (MOST_ROWS, 24), (3, MOST_ROWS, 24), (0, 24)]
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("intel", [True, False])
def test_it_equals_a_linear_layer_for_any_number_of_rows(dtype, shape, bias, intel, monkeypatch):
    monkeypatch.setattr(smallrows, "has_kernels", lambda: intel)
    torch.manual_seed(0)
    layer = nn.Linear(24, 40, bias=bias, dtype=dtype)
    x = torch.randn(shape, dtype=dtype)
    out = small_linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(out, F.linear(x, layer.weight, layer.bias), rtol=1e-4, atol=1e-4)
    assert out.is_contiguous()


def test_plain_linear_layers_are_switched_and_others_are_left_alone():
    class Other(nn.Linear):
        pass

    module = nn.Sequential(nn.Linear(4, 4), Other(4, 4), nn.Sequential(nn.Linear(4, 4)))
    before = module(torch.ones(3, 4))
    use_small_rows(module)
    assert [type(module[0]), type(module[1]), type(module[2][0])] == [SmallRowsLinear, Other, SmallRowsLinear]
    torch.testing.assert_close(module(torch.ones(3, 4)), before)


@pytest.mark.parametrize(
    ("text", "fast"),
    [
        ("processor\t: 0\nvendor_id\t: GenuineIntel\n", torch.backends.mkl.is_available()),
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\n", False),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", False),
    ],
)
def test_who_made_the_processor_decides(tmp_path: Path, text: str, fast: bool):
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert has_kernels(path) is fast
    assert not has_kernels(tmp_path / "missing")
