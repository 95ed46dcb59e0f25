"""Index fragments as they are written: Arrow streams that carry a checksum of themselves.

The columns are specified in docs/cache-format.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import crc32c
import numpy as np
import pyarrow as pa

from dflash.cache.manifest import FORMAT_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dflash.cache.shard import ShardLayout

INDEX_FOLDER = "index"
FRAGMENT_SUFFIX = ".arrow"
MAX_FRAGMENT_ROWS = 1 << 20
"""Bounds the memory that one fragment needs while it is loaded."""
SCHEMA = pa.schema(
    [
        pa.field("id", pa.uint64(), nullable=False),
        pa.field("bucket", pa.int32(), nullable=False),
        pa.field("shard", pa.dictionary(pa.int32(), pa.string()), nullable=False),
        pa.field("row", pa.int32(), nullable=False),
        pa.field("length", pa.int32(), nullable=False),
        pa.field("supervised", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("nbytes", pa.int64(), nullable=False),
        pa.field("crc32c", pa.uint32(), nullable=False),
    ]
)
CHECKSUM_MARK = b"crc32c:"
CHECKSUM_BLANK = b"00000000"
DIGESTS = "dflash.xxh3_128"


class IndexRow(NamedTuple):
    """One committed sample, as its fragment stores it."""

    id: int
    length: int
    """Tokens."""
    supervised: int
    """Tokens whose loss mask is 1."""
    offset: int
    """First byte of the extent in the shard."""
    nbytes: int
    """Bytes of the extent."""
    crc32c: int


def fragment_path(cache: Path, name: str) -> Path:
    """Path of the fragment called `name`."""
    return cache / INDEX_FOLDER / f"{name}{FRAGMENT_SUFFIX}"


def fragment_bytes(layout: ShardLayout, rows: Sequence[IndexRow], name: str, digest: str) -> bytes:
    """The fragment `name` that commits one shard with this digest."""
    count = len(rows)
    columns: dict[str, Any] = {key: [getattr(row, key) for row in rows] for key in IndexRow._fields}
    columns |= {
        "bucket": np.full(count, layout.edge, np.int32),
        "shard": np.zeros(count, np.int32),
        "row": np.arange(count, dtype=np.int32),
    }
    return encode_fragment([layout.name], columns, name, layout.manifest.digest(), [digest])


def encode_fragment(
    shards: Sequence[str],
    columns: Mapping[str, Any],
    name: str,
    identity: str,
    digests: Sequence[str] = (),
) -> bytes:
    """A fragment that commits these shards: an Arrow IPC stream with its own checksum in the schema.

    Args:
        shards: Names of the shards.
        columns: The columns of `SCHEMA` in the order of the shards; `shard` holds positions in `shards`.
        name: The fragment's name, without folder and suffix.
        identity: Digest of the cache's identity.
        digests: `shard_digest` of each shard.
    """
    metadata = ({DIGESTS: " ".join(digests)} if digests else {}) | {
        "dflash.format": str(FORMAT_VERSION),
        "dflash.checksum": (CHECKSUM_MARK + CHECKSUM_BLANK).decode(),
        "dflash.fragment": name,
        "dflash.identity": identity,
    }
    schema = SCHEMA.with_metadata(metadata)
    positions = pa.DictionaryArray.from_arrays(pa.array(columns["shard"], pa.int32()), pa.array(shards))
    arrays = [
        positions if column.name == "shard" else pa.array(columns[column.name], column.type)
        for column in SCHEMA
    ]
    return _sealed(pa.RecordBatch.from_arrays(arrays, schema=schema))


def renamed_fragment(data: bytes, name: str) -> bytes:
    """A whole fragment under another name."""
    with pa.ipc.open_stream(data) as stream:
        batch = stream.read_next_batch()
    blank = (CHECKSUM_MARK + CHECKSUM_BLANK).decode()
    metadata = {**batch.schema.metadata, b"dflash.checksum": blank, b"dflash.fragment": name}
    return _sealed(batch.replace_schema_metadata(metadata))


def _sealed(batch: Any) -> bytes:
    """The stream of a record batch in whose metadata the checksum is blank, with its checksum."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    data = bytearray(sink.getvalue())
    at = data.index(CHECKSUM_MARK) + len(CHECKSUM_MARK)
    data[at : at + 8] = b"%08x" % crc32c.crc32c(data)
    return bytes(data)
