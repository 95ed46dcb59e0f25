"""Prompts of the benchmarks that drafters are compared on, by name, through `datasets`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.errors import CorpusError
from dflash.extract.formats import Row

_STEPS = "Please reason step by step, and put your final answer within \\boxed{}."
_CODE = "Write a solution to the following problem and make sure that it passes the tests:"


@dataclass(frozen=True)
class Benchmark:
    """Where a benchmark is, and what is asked."""

    path: str
    """Name of the data set."""
    subset: str | None
    split: str
    question: Callable[[Mapping[str, Any]], str]
    """The user's turn of a row."""
    kind: Callable[[Mapping[str, Any]], str] | None = None
    """Kind of prompt of a row; by default the benchmark's name."""


BENCHMARKS = {
    "gsm8k": Benchmark("openai/gsm8k", "main", "test", lambda row: f"{row['question']}\n{_STEPS}"),
    "math500": Benchmark("HuggingFaceH4/MATH-500", None, "test", lambda row: f"{row['problem']}\n{_STEPS}"),
    "humaneval": Benchmark(
        "openai/openai_humaneval",
        None,
        "test",
        lambda row: f"{_CODE}\n```python\n{row['prompt']}\n```",
    ),
    "mbpp": Benchmark("google-research-datasets/mbpp", "sanitized", "test", lambda row: str(row["prompt"])),
    "mt-bench": Benchmark(
        "HuggingFaceH4/mt_bench_prompts",
        None,
        "train",
        lambda row: str(row["prompt"][0]),  # the first of two turns
        lambda row: str(row["category"]),
    ),
}


def is_benchmark(name: str) -> bool:
    """Whether this names a benchmark; a file of that name comes first."""
    return name in BENCHMARKS and not Path(name).exists()


def benchmark_rows(name: str) -> Iterator[Row]:
    """Rows with `prompt`, `kind` and `id`.

    Raises:
        CorpusError: the data set cannot be loaded.
    """
    from datasets import load_dataset

    benchmark = BENCHMARKS[name]
    try:
        data = load_dataset(benchmark.path, benchmark.subset, split=benchmark.split)
    except Exception as error:  # whatever datasets raises: no network, no such name, a broken file
        reason = str(error).strip().split("\n")[0][:200]
        raise CorpusError(
            f"--data {name}: cannot load {benchmark.path} ({reason}); offline, give a file with its prompts"
        ) from error
    for number, fields in enumerate(data):
        kind = benchmark.kind(fields) if benchmark.kind else name
        row = {"prompt": benchmark.question(fields), "kind": kind, "id": f"{name}-{number}"}
        yield Row(f"{name}, row {number}", row)
