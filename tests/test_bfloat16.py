"""Products in bfloat16 where the processor has no instructions for them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import write_target
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dflash import bfloat16
from dflash.bfloat16 import FEWEST, WideProducts, bfloat16_products, has_products, product_dtype
from dflash.extract.codec_probe import target_logits
from dflash.target import Target, TruncatedTarget
from dflash.train.config import TrainConfig
from dflash.train.optim import OptimConfig, build_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")
SIZES = st.integers(FEWEST, 150)


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without such instructions."""
    monkeypatch.setattr(bfloat16, "has_products", lambda: False)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _exact(left: Tensor, right: Tensor) -> Tensor:
    return left.double() @ right.double()


@given(SIZES, st.integers(1, 300), SIZES)
def test_each_product_is_the_exact_one_rounded_once(rows: int, between: int, columns: int) -> None:
    """So are those that write into given memory, and those of a batch; no error is larger than a rounding."""
    left, right = _random(rows, between), _random(between, columns, seed=1)
    batch = left.expand(3, rows, between), right.expand(3, between, columns)
    with WideProducts():
        into = torch.mm(left, right, out=torch.empty(rows, columns).bfloat16())
        found = [left @ right, into, *torch.bmm(*batch), torch.nn.functional.linear(left, right.T)]
    # 2^-8 of the value is half a step of bfloat16; beside it what float32 loses in adding up
    room = 2**-8 * _exact(left, right).abs() + 1e-5 * _exact(left.abs(), right.abs())
    for product in found:
        assert product.dtype == torch.bfloat16
        assert bool(((product.double() - _exact(left, right)).abs() <= room * 1.01).all())


@pytest.mark.parametrize("add", [torch.addmm, torch.baddbmm])
def test_what_is_added_is_added_before_rounding(add: Callable[..., Tensor]) -> None:
    """With the factors that were asked for."""
    left, right, more = _random(80, 96), _random(96, 70, seed=1), _random(80, 70, seed=2)
    batched = add is torch.baddbmm
    given_ = [part[None] if batched else part for part in (more, left, right)]
    with WideProducts():
        found = add(*given_, beta=-2.0, alpha=0.5)
    exact = -2.0 * more.double() + 0.5 * _exact(left, right)
    assert (found.double().view_as(exact) - exact).abs().max() <= 2**-8 * exact.abs().max()


@pytest.mark.parametrize("guard", [torch.inference_mode, torch.enable_grad])
def test_a_module_of_others_gives_and_learns_the_same(guard: Callable[[], Any]) -> None:
    """Under autocast too, as gradients of a training step are."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(96, 128), nn.SiLU(), nn.Linear(128, 64))
    x, results = torch.randn(70, 96), []
    for products in (nullcontext(), WideProducts()):
        network.zero_grad()
        with guard(), products:
            with torch.autocast("cpu", torch.bfloat16):
                out = network(x)
            if out.requires_grad:
                out.float().square().sum().backward()
        grads = [p.grad.clone() for p in network.parameters() if p.grad is not None]
        results.append([out, *grads])
    for native, wide in zip(*results, strict=True):
        assert native.dtype == wide.dtype
        assert (native.float() - wide.float()).norm() <= 0.01 * native.float().norm()


class Products(TorchDispatchMode):
    """Notes in which dtypes products come out of a mode inside this one."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.linear, torch.ops.aten.matmul):
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(80, 96), (3, 40, 96), (2, 3, 20, 96)])
@torch.inference_mode()
def test_rows_of_a_batch_count_together_where_one_matrix_multiplies_them(shape: tuple[int, ...]) -> None:
    """In inference `linear` and `matmul` are seen whole; what is added is added before rounding."""
    left, weight, bias = _random(*shape), _random(70, 96, seed=1), _random(70, seed=2)
    with Products() as products, WideProducts():
        found = torch.nn.functional.linear(left, weight, bias), left @ weight.mT
    assert products.dtypes == [torch.float32] * 2
    exact = _exact(left, weight.mT)
    for product, wanted in zip(found, (exact + bias.double(), exact), strict=True):
        assert product.dtype == torch.bfloat16
        assert bool(((product.double() - wanted).abs() <= 2**-8 * wanted.abs() + 1e-3).all())


@torch.inference_mode()
def test_products_with_a_vector_are_left_alone() -> None:
    """Reading the matrix is all of their work."""
    matrix, vector = _random(100, 100), _random(100, seed=1)
    with Products() as products, WideProducts():
        found = matrix @ vector, vector @ matrix, vector @ vector, torch.nn.functional.linear(vector, matrix)
    assert products.dtypes == [torch.bfloat16] * 4
    wanted = matrix @ vector, vector @ matrix, vector @ vector, torch.nn.functional.linear(vector, matrix)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_float32_and_small_products_are_left_alone() -> None:
    """Bit for bit."""
    for left, right in ((_random(100, 100).float(),) * 2, (_random(3, 500), _random(500, 900, seed=1))):
        plain = left @ right
        with WideProducts():
            assert torch.equal(left @ right, plain)


@pytest.mark.parametrize("there", [True, False])
def test_only_bfloat16_on_a_processor_without_it_is_computed_otherwise(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs have such products, and float32 is what it is."""
    monkeypatch.setattr(bfloat16, "has_products", lambda: there)
    for dtype in (torch.bfloat16, torch.float32):
        for device in (CPU, torch.device("cuda", 0), torch.device("meta")):
            changes = not there and dtype == torch.bfloat16 and device == CPU
            assert product_dtype(dtype, device) == (torch.float32 if changes else dtype)
            assert isinstance(bfloat16_products(dtype, device), WideProducts) == changes


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({"avx2": True, "avx512_bf16": False, "amx_bf16": False}, False),
        ({"avx512_bf16": True, "amx_bf16": False}, True),
        ({"avx512_bf16": True, "amx_bf16": True, "cpu_name": "some"}, True),
        ({"neon": True, "bf16": True, "sve_max_length": 16}, True),
        ({"avx2": True, "cpu_name": "bf16 in its name alone"}, False),
        ({}, False),
    ],
)
def test_a_processor_says_whether_it_has_them(
    capabilities: dict[str, object], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the names of its features."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    has_products.cache_clear()
    try:
        assert has_products() is expected
    finally:
        has_products.cache_clear()


def test_a_torch_that_cannot_tell_computes_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As all did before there was this question."""
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    has_products.cache_clear()
    try:
        assert has_products()
    finally:
        has_products.cache_clear()


@pytest.mark.usefixtures("lacking")
def test_muon_turns_a_matrix_the_same_way() -> None:
    """Its Newton-Schulz iteration is in bfloat16 whatever the parameters are in."""
    moved = []
    for products in (True, False):
        matrix = nn.Linear(96, 128)
        nn.init.zeros_(matrix.weight)
        matrix.weight.grad, matrix.bias.grad = _random(128, 96).float(), torch.zeros(128)
        optimizer = build_optimizer(matrix, OptimConfig("muon", lr=1.0, weight_decay=0.0))
        if products:
            optimizer.step()
        else:
            optimizer._parts[0].step()  # what it does by itself
        moved.append(matrix.weight.detach())
    assert (moved[0] - moved[1]).norm() <= 0.03 * moved[1].norm()


def test_a_target_gives_the_same_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In extraction and verification, bfloat16 as before."""
    folder = str(write_target(tmp_path / "target", hidden=128))
    ids, states, widened = np.arange(5, 105) % 60, [], list[Any]()
    wide = bfloat16._wide
    monkeypatch.setattr(bfloat16, "_wide", lambda value: (widened.append(value), wide(value))[1])
    for there in (True, False):
        monkeypatch.setattr(bfloat16, "has_products", lambda there=there: there)
        part = TruncatedTarget(folder, (1, 3), dtype=torch.bfloat16, device=CPU)
        extracted = torch.empty(len(ids), 2, 128, dtype=torch.bfloat16)
        part.capture([ids], extracted)
        whole = Target(folder, (1, 3), dtype=torch.bfloat16, device=CPU)
        logits, taken = whole.forward(torch.from_numpy(ids), whole.new_cache(), keep_logits=80)
        assert torch.equal(taken, extracted.flatten(1))
        states.append((extracted.float(), logits.float()))
        assert (len(widened) == 0) == there
        probed = target_logits(whole, torch.from_numpy(ids))[-80:]
        assert torch.equal(probed, logits)
    for native, other in zip(*states, strict=True):
        assert (native - other).norm() <= 0.02 * native.norm()


@pytest.mark.parametrize("there", [True, False])
def test_training_in_bfloat16_is_in_float32_there(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked for stays in the record, so that another machine goes on with it."""
    monkeypatch.setattr(bfloat16, "has_products", lambda: there)
    config = TrainConfig(Path("cache"), Path("run"))
    assert config.compute_dtype(CPU) == (torch.bfloat16 if there else torch.float32)
    assert config.compute_dtype(torch.device("cuda")) == torch.bfloat16
    assert config.settings()["precision"] == "bfloat16"
