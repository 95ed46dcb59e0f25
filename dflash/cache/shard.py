"""The bytes of a shard: the only module that knows where in the file what lies.

A shard is a safetensors file that any user can open. Dimensions: T tokens of all samples, N samples,
K tapped layers, H hidden size.

    byte 0      length of the header (u64), then the header, padded with spaces
    byte 4096   hidden_states [T, K, H]     one contiguous extent a sample: one `preadv` reads it
                offsets [N + 1] int64       sample i is tokens offsets[i] .. offsets[i + 1]
                input_ids [T] int32
                loss_mask [T] uint8         1 where a token is supervised

With another codec than raw, `coded` [bytes] uint8 takes the place of `hidden_states`, and behind `offsets`
stands `extents` [N + 1] int64: sample i is bytes extents[i] .. extents[i + 1] of it.
The header is a pure function of a `ShardLayout`: a reader compares it byte for byte instead of trusting it.
The room before byte 4096 lets the writer stream hidden states and add the header last, in bounded memory.
"""

from __future__ import annotations

import json
import re
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import crc32c
import numpy as np
import xxhash

from dflash.cache.codec import TORCH_DTYPES
from dflash.cache.manifest import FORMAT_VERSION, Manifest, bucket_name
from dflash.errors import CacheError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from dflash.cache.codec import Codec
    from dflash.cache.quantised import CodedStates

DATA_START = 4096
"""First byte of the hidden states; the header never grows beyond it."""
SHARDS_FOLDER = "shards"
SHARD_SUFFIX = ".safetensors"
_SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float32": "F32"}
_CHUNK = 8 << 20
_UNIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_SHARD_NAME = re.compile(rf"{SHARDS_FOLDER}/(len-[0-9]{{5,9}})/({_UNIT.pattern}){re.escape(SHARD_SUFFIX)}")


@dataclass(eq=False)
class Sample:
    """One conversation with its hidden states; T is its length in tokens."""

    id: int
    """Stable 64-bit hash (unsigned) of the tokens and of the source row."""
    input_ids: NDArray[np.int32]
    """[T]."""
    loss_mask: NDArray[np.uint8]
    """[T], 1 where a token is supervised."""
    hidden_states: torch.Tensor
    """[T, K, H] in the cache's dtype, on any device; empty where `coded` holds them."""
    coded: CodedStates | None = None
    """States that are decoded by whoever uses them."""


@dataclass(frozen=True)
class ShardLayout:
    """Where everything lies in one shard, computed from counts alone."""

    name: str
    """Path in the cache, e.g. `shards/len-00256/rank0-000000.safetensors`."""
    manifest: Manifest
    edge: int
    """Edge of the shard's bucket in tokens."""
    samples: int
    tokens: int
    coded_bytes: int = 0
    """Bytes of all extents; with the codec raw they follow from the tokens."""

    @property
    def is_raw(self) -> bool:
        """Whether hidden states are stored as they are."""
        return self.manifest.identity.codec == "raw"

    @property
    def extent_bytes(self) -> int:
        """Bytes of all extents."""
        return self.tokens * self.manifest.identity.bytes_per_token if self.is_raw else self.coded_bytes

    @property
    def offsets_start(self) -> int:
        """First byte of `offsets`."""
        return DATA_START + self.extent_bytes

    @property
    def extents_start(self) -> int:
        """First byte of `extents`."""
        return self.offsets_start + 8 * (self.samples + 1)

    @property
    def input_ids_start(self) -> int:
        """First byte of `input_ids`."""
        return self.extents_start + (0 if self.is_raw else 8 * (self.samples + 1))

    @property
    def loss_mask_start(self) -> int:
        """First byte of `loss_mask`."""
        return self.input_ids_start + 4 * self.tokens

    @property
    def file_size(self) -> int:
        """Bytes of the whole file."""
        return self.loss_mask_start + self.tokens

    def header(self) -> bytes:
        """The first 4096 bytes of the file."""
        identity = self.manifest.identity
        value: dict[str, Any] = {
            "__metadata__": {
                "format": "dflash-cache",
                "version": str(FORMAT_VERSION),
                "identity": self.manifest.digest(),
                "bucket": str(self.edge),
                "unit": unit_of(self.name),
                "codec": identity.codec,
            }
        }
        tensors = self._tensors()
        ends = [*(start for _, start, _, _ in tensors[1:]), self.file_size]
        for (name, start, dtype, shape), end in zip(tensors, ends, strict=True):
            extent = [start - DATA_START, end - DATA_START]
            value[name] = {"dtype": dtype, "shape": shape, "data_offsets": extent}
        text = json.dumps(value, separators=(",", ":")).encode()
        return struct.pack("<Q", DATA_START - 8) + text.ljust(DATA_START - 8)

    def _tensors(self) -> list[tuple[str, int, str, list[int]]]:
        """Name, first byte, dtype and shape of each tensor, in the order of the file."""
        identity = self.manifest.identity
        shape = [self.tokens, len(identity.taps), identity.hidden_size]
        coded = [("coded", DATA_START, "U8", [self.coded_bytes])]
        raw = [("hidden_states", DATA_START, _SAFETENSORS_DTYPES[identity.dtype], shape)]
        extents = [("extents", self.extents_start, "I64", [self.samples + 1])]
        return [
            *(raw if self.is_raw else coded),
            ("offsets", self.offsets_start, "I64", [self.samples + 1]),
            *([] if self.is_raw else extents),
            ("input_ids", self.input_ids_start, "I32", [self.tokens]),
            ("loss_mask", self.loss_mask_start, "U8", [self.tokens]),
        ]


def shard_name(edge: int, unit: str) -> str:
    """Path of a shard in its cache.

    Raises:
        CacheError: `unit` is not a plain file name of at most 100 letters, digits, `_`, `.` and `-`.
    """
    if not _UNIT.fullmatch(unit):
        raise CacheError(f"writer name {unit!r} is not a plain name of letters, digits, '_', '.' and '-'")
    return f"{SHARDS_FOLDER}/{bucket_name(edge)}/{unit}{SHARD_SUFFIX}"


def is_shard_name(name: str) -> bool:
    """Whether a name from a file points at a shard inside the cache and nowhere else."""
    return _SHARD_NAME.fullmatch(name) is not None


def unit_of(name: str) -> str:
    """The unit in a shard's name."""
    return Path(name).name.removesuffix(SHARD_SUFFIX)


def shard_digest(file: BinaryIO) -> str:
    """xxh3-128 (32 hex digits) of a shard's bytes from 4096 to the end, then of its header.

    The header comes last because the writer knows it last. Memory is bounded.
    """
    state = xxhash.xxh3_128()
    file.seek(0)
    header = file.read(DATA_START)
    while chunk := file.read(_CHUNK):
        state.update(chunk)
    state.update(header)
    return state.hexdigest()


def sample_crc(hidden: Any, input_ids: Any, loss_mask: Any) -> int:
    """crc32c over the sample's bytes as stored: its extent, then input ids, then loss mask."""
    return int(crc32c.crc32c(loss_mask, crc32c.crc32c(input_ids, crc32c.crc32c(hidden))))


def check_sample(sample: Sample, manifest: Manifest) -> None:
    """Refuse a sample that does not fit the cache, before a byte of it is written.

    Raises:
        CacheError: an id, shape, dtype or value is wrong; the text names it.
    """
    identity = manifest.identity
    length = len(sample.input_ids)
    shape = (length, len(identity.taps), identity.hidden_size)
    problems = {
        f"id {sample.id} is not an unsigned 64-bit integer": not 0 <= sample.id < 1 << 64,
        f"{length} tokens, not 1 to {identity.max_length}": not 1 <= length <= identity.max_length,
        f"hidden states {tuple(sample.hidden_states.shape)}, not {shape}": sample.hidden_states.shape
        != shape,
        f"hidden states in {sample.hidden_states.dtype}, not {identity.dtype}": (
            sample.hidden_states.dtype != TORCH_DTYPES[identity.dtype]
        ),
        "input_ids is not an int32 vector": sample.input_ids.dtype != np.int32 or sample.input_ids.ndim != 1,
        "loss_mask is not a uint8 vector of the same length": (
            sample.loss_mask.dtype != np.uint8 or sample.loss_mask.shape != sample.input_ids.shape
        ),
    }
    for problem, wrong in problems.items():
        if wrong:
            raise CacheError(f"sample {sample.id}: {problem}")
    if int(sample.loss_mask.max()) > 1:
        raise CacheError(f"sample {sample.id}: loss_mask holds other values than 0 and 1")
    if int(sample.input_ids.min()) < 0 or int(sample.input_ids.max()) >= identity.vocab_size:
        raise CacheError(f"sample {sample.id}: a token id is outside the vocabulary of {identity.vocab_size}")


class ShardStream:
    """A shard that is being written: hidden states go to the file at once, the small tensors stay in memory.

    Args:
        path: File to write, not there yet; `finish` or `discard` closes it.
        codec: Of the cache.
    """

    def __init__(self, path: Path, codec: Codec) -> None:
        self.path, self._codec = path, codec
        self.size = DATA_START
        self._file: BinaryIO = path.open("xb")
        self._file.write(bytes(DATA_START))
        self._digest = xxhash.xxh3_128()
        self._offsets, self._extents = [0], [0]
        self._input_ids: list[NDArray[np.int32]] = []
        self._loss_mask: list[NDArray[np.uint8]] = []

    @property
    def samples(self) -> int:
        """Samples so far."""
        return len(self._input_ids)

    @property
    def tokens(self) -> int:
        """Tokens so far."""
        return self._offsets[-1]

    @property
    def coded_bytes(self) -> int:
        """Bytes of all extents so far."""
        return self._extents[-1]

    def append(self, sample: Sample) -> tuple[int, int, int]:
        """Add a sample that `check_sample` has passed.

        Returns:
            First byte of its extent in the file, the extent's number of bytes, and the sample's crc32c.

        Raises:
            CacheError: the codec cannot store NaN or infinity, and the sample holds some.
        """
        try:
            hidden = self._codec.encode(sample.hidden_states)
        except ValueError as error:
            raise CacheError(f"sample {sample.id}: {error}") from error
        input_ids = np.array(sample.input_ids, dtype="<i4")  # copies: the caller may reuse its arrays
        loss_mask = np.array(sample.loss_mask)
        start = self.size
        self._put(hidden)
        self.size += hidden.nbytes
        self._input_ids.append(input_ids)
        self._loss_mask.append(loss_mask)
        self._offsets.append(self.tokens + len(input_ids))
        self._extents.append(self.size - DATA_START)
        return start, hidden.nbytes, sample_crc(hidden, input_ids, loss_mask)

    def finish(self, layout: ShardLayout) -> str:
        """Write the small tensors and the header, and close. Flushing to disk is the commit's work.

        Returns:
            The shard's digest, as `shard_digest` would compute it.
        """
        self._put(np.array(self._offsets, dtype="<i8"))
        if not layout.is_raw:
            self._put(np.array(self._extents, dtype="<i8"))
        self._put(np.concatenate(self._input_ids))
        self._put(np.concatenate(self._loss_mask))
        self._file.seek(0)
        self._put(np.frombuffer(layout.header(), np.uint8))
        self._file.close()
        return self._digest.hexdigest()

    def _put(self, array: NDArray[Any]) -> None:
        data = array.data.cast("B")
        self._digest.update(data)
        self._file.write(data)

    def discard(self) -> None:
        """Close and remove the file."""
        with suppress(OSError):  # what is still buffered may not fit on a full disk
            self._file.close()
        self.path.unlink(missing_ok=True)
