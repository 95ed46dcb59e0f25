"""Layers through torch.compile compute what they compute without it."""

from __future__ import annotations

import pytest
import torch
from test_objective import SHAPE, gradients, make_documents, make_loss

from dflash.train.batches import pack
from dflash.train.compiled import compile_layers


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own
def test_compiled_layers_give_the_same_gradients_and_new_shapes_compile_nothing_new():
    loss, compiled = make_loss(), make_loss()
    compile_layers(compiled.drafter, backend="eager")
    graphs = []
    for lengths in ((20, 12, 9), (30, 7), (14, 25, 8, 3)):
        batch = pack(make_documents(*lengths), SHAPE)
        expected, _ = gradients(loss, [batch])
        found, _ = gradients(compiled, [batch])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[0] == graphs[1] == graphs[2]
    assert not torch._dynamo.utils.counters["graph_break"]
