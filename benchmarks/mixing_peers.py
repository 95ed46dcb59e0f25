"""What other projects' samplers draw, each by its own code, as steps of micro-batches of sample numbers.

Run by `mixing.py` in an environment that holds the peers: `mixing_peers.py NAME JOB.json OUT.json`. The job
has `lengths` and `buckets` of the samples, `ranks`, and `tokens` of a micro-batch.

A peer whose batches are counted in samples gets as many as make an average micro-batch; a peer that only
orders samples is cut into micro-batches as they come. Each shuffles, which is its most favourable mode.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

Steps = list[list[list[int]]]


class Job(NamedTuple):
    """The samples and the step they are to be drawn for."""

    lengths: list[int]
    buckets: list[int]
    ranks: int
    tokens: int

    @property
    def samples_per_batch(self) -> int:
        """Samples that fill a micro-batch on average."""
        return int(self.tokens // np.mean(self.lengths))


def lhotse(job: Job) -> Steps:
    """`DynamicBucketingSampler` as it is by default: ten buckets, the ranks synchronised."""
    from lhotse import CutSet, MonoCut
    from lhotse.dataset.sampling import DynamicBucketingSampler

    cuts = [MonoCut(str(row), start=0, duration=n, channel=0) for row, n in enumerate(job.lengths)]
    of_ranks = []
    for rank in range(job.ranks):
        sampler = DynamicBucketingSampler(
            CutSet.from_cuts(cuts), max_duration=job.tokens, shuffle=True, world_size=job.ranks, rank=rank
        )
        of_ranks.append([[int(cut.id) for cut in batch] for batch in sampler])
    return _steps_of(of_ranks)


def transformers(job: Job) -> Steps:
    """`LengthGroupedSampler`, the order behind `group_by_length`, cut into micro-batches in that order."""
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    sampler = LengthGroupedSampler(
        job.samples_per_batch, lengths=job.lengths, generator=torch.Generator().manual_seed(0)
    )
    batches: list[list[int]] = [[]]
    filled = 0
    for row in sampler:
        if filled + job.lengths[row] > job.tokens:
            batches.append([])
            filled = 0
        batches[-1].append(int(row))
        filled += job.lengths[row]
    return [batches[at : at + job.ranks] for at in range(0, len(batches) - job.ranks + 1, job.ranks)]


def speculators(job: Job) -> Steps:
    """`MultipackDistributedBatchSamplerV2`."""
    module = _module("speculators", "speculators.train.distributed_batch_sampler")
    return _steps_of(
        [
            [
                batch.tolist()
                for batch in module.MultipackDistributedBatchSamplerV2(
                    job.tokens, job.lengths, job.ranks, rank
                )
            ]
            for rank in range(job.ranks)
        ]
    )


def streaming_random(job: Job) -> Steps:
    """mosaicml-streaming's `batching_method="random"`: the default, over all samples at once."""
    return _streaming(job, "random")


def streaming_stratified(job: Job) -> Steps:
    """mosaicml-streaming's `batching_method="stratified"`, each bucket a stream."""
    return _streaming(job, "stratified")


def streaming_per_device(job: Job) -> Steps:
    """mosaicml-streaming's `batching_method="device_per_stream"`: a rank's batch is of one bucket."""
    return _streaming(job, "device_per_stream")


def _streaming(job: Job, method: str) -> Steps:
    batching = _module("streaming", "streaming.base.batching")
    world = SimpleNamespace(
        num_nodes=1, ranks_per_node=job.ranks, num_ranks=job.ranks, workers_per_rank=1, is_local_leader=True
    )
    work = batching.batching_methods[method](_StreamingDataset(job), world, 0, 0)
    # [node, rank, worker, batch, sample]; -1 pads an incomplete batch
    return [
        [[int(row) for row in batch if row >= 0] for batch in batches]
        for batches in work[0, :, 0].transpose(1, 0, 2)
        if (batches >= 0).all()
    ]


class _StreamingDataset:
    """What the batching functions read of a `StreamingDataset`: one stream for each bucket, shards of 256."""

    num_canonical_nodes = initial_physical_nodes = 1
    partition_algo, shuffle_algo = "relaxed", "py1e"
    shuffle, shuffle_seed, epoch_seed_change = True, 0, True
    shuffle_block_size = 1 << 18

    def __init__(self, job: Job) -> None:
        buckets = np.array(job.buckets)
        self.batch_size = self.device_batch_size = job.samples_per_batch
        self.epoch_size = len(buckets)
        self._rows = [np.flatnonzero(buckets == bucket) for bucket in np.unique(buckets)]
        self.num_streams = len(self._rows)
        self.streams = [SimpleNamespace(proportion=len(rows) / len(buckets)) for rows in self._rows]

    def resample_streams(self, _epoch: int, stream: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Sizes of the shards, and the samples in their order."""
        rows = np.arange(self.epoch_size) if stream is None else self._rows[stream]
        whole, rest = divmod(len(rows), 256)
        return np.array([256] * whole + [rest] * (rest > 0)), rows


def _steps_of(of_ranks: Sequence[Sequence[list[int]]]) -> Steps:
    return [list(batches) for batches in zip(*of_ranks, strict=False)]


def _module(package: str, name: str) -> ModuleType:
    """Import a module past its package's own imports, which want the clients of several cloud services."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError(f"{package} is not installed")
    folder, parts = Path(next(iter(spec.submodule_search_locations))), name.split(".")
    for depth in range(1, len(parts)):
        parent = ModuleType(".".join(parts[:depth]))
        parent.__path__ = [str(folder.joinpath(*parts[1:depth]))]
        sys.modules[parent.__name__] = parent
    return importlib.import_module(name)


PEERS: dict[str, Any] = {
    "lhotse": lhotse,
    "transformers": transformers,
    "streaming_random": streaming_random,
    "streaming_stratified": streaming_stratified,
    "streaming_per_device": streaming_per_device,
    "speculators": speculators,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    peer, job_file, out_file = sys.argv[1:]
    Path(out_file).write_text(json.dumps(PEERS[peer](Job(**json.loads(Path(job_file).read_text())))))
