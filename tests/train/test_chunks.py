"""How many positions go through the lm_head at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.train.chunks import ON_CPU, ON_CUDA, ROWS_MULTIPLE, chunk_rows, missing_rows


@settings(max_examples=100)
@given(st.integers(1, 1 << 20), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(1, 8))
def test_chunks_stay_within_the_bound_and_come_in_few_sizes(vocab, dtype, copies):
    lm_head = torch.empty(1, 1, dtype=dtype).expand(vocab, 1)
    rows, bytes_of_one = chunk_rows(lm_head, copies), vocab * dtype.itemsize * copies
    assert 1 <= rows <= ON_CPU.rows
    assert rows == 1 or rows * bytes_of_one <= ON_CPU.size
    assert rows % ROWS_MULTIPLE == 0 or (rows + 1) * bytes_of_one > ON_CPU.size
    assert chunk_rows(lm_head.to("meta"), copies) >= rows


@pytest.mark.parametrize("vocab", [32_000, 151_936, 262_144])
def test_on_a_gpu_a_chunk_has_more_operations_a_byte_than_its_memory_allows(vocab):
    """An H100: 990 TFLOP/s and 3.35 TB/s; each row is one operation a byte of a bfloat16 head."""
    rows = chunk_rows(torch.empty(vocab, 1, device="meta", dtype=torch.bfloat16))
    assert 990e12 / 3.35e12 < rows <= ON_CUDA.rows


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 640])
def test_positions_are_filled_up_on_a_cpu_alone(count):
    assert (count + missing_rows(count, torch.device("cpu"))) % ROWS_MULTIPLE == 0
    assert missing_rows(count, torch.device("meta")) == 0
