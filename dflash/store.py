"""Objects in a store that a URL names, `s3://`, `gs://` or `memory://`, through the extra `remote`.

Every request is tried again until `retry_s` seconds are over: refusals for overload (503), time-outs, dropped
connections and bodies cut short are the store's everyday life. What cannot be repaired by waiting (no such
bucket, no permission) is raised at once.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from dflash.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEMES = ("s3", "gs", "memory")
RETRY_S = 120.0
"""Seconds for which a request is tried again, unless `DFLASH_STORE_RETRY_S` is set."""
TIMEOUT_S = 60.0
"""Seconds in which `PIECE_BYTES` have to be read, unless `DFLASH_STORE_TIMEOUT_S` is set."""
PIECE_BYTES = 16 << 20
_UPLOAD_TIMEOUTS = 15
"""A shard goes up in one request, since only that can be conditional; it gets so many times that."""
_STREAMS = 8
_memory: dict[str, Any] = {}
_memory_lock = threading.Lock()
T = TypeVar("T")


def is_url(place: str) -> bool:
    """Whether this names an object store, or a file by URL, and not a path."""
    return "://" in place


def path_of_url(url: str) -> Path | None:
    """The path in a `file://` URL; None for another scheme.

    Raises:
        ConfigError: the scheme is unknown, or the URL names another machine or no place in its store.
    """
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc not in {"", "localhost"} or not parts.path:
            raise ConfigError(f"{url}: a file URL is file:///absolute/path")
        return Path(unquote(parts.path))
    if parts.scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in ("file", *SCHEMES))
        raise ConfigError(f"{url}: unknown kind of URL; use {known} or a path")
    if not parts.netloc and parts.scheme != "memory":
        raise ConfigError(f"{url}: names no bucket; use {parts.scheme}://bucket/folder")
    return None


class Listed(NamedTuple):
    """What a listing tells of an object."""

    size: int
    """Bytes."""
    written: int
    """When, by the store's clock, in seconds since 1970."""


class Store:
    """The objects below one URL, by keys such as `index/rank0-000000.arrow`.

    Args:
        url: Of a scheme in `SCHEMES`. Credentials and endpoint come from the environment, for S3
            `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION` and `AWS_ENDPOINT_URL`, for Google's
            store `GOOGLE_APPLICATION_CREDENTIALS` or `GOOGLE_BEARER_TOKEN`, and `GOOGLE_BASE_URL`.
        retry_s: Seconds for which a failing request is tried again.

    Raises:
        ConfigError: the extra is not installed, or the URL or the environment cannot be used.
    """

    def __init__(self, url: str, retry_s: float | None = None) -> None:
        self.url = url.rstrip("/")
        self.retry_s = seconds_of("DFLASH_STORE_RETRY_S", RETRY_S) if retry_s is None else retry_s
        timeout_s = seconds_of("DFLASH_STORE_TIMEOUT_S", TIMEOUT_S)
        try:
            import obstore
        except ImportError as error:
            raise ConfigError(
                f"{url}: object stores need the extra `remote`: pip install 'dflash-trainer[remote]'"
            ) from error
        self._obstore: Any = obstore
        try:
            self._reading = _opened(self.url, timeout_s)
            self._writing = _opened(self.url, timeout_s * _UPLOAD_TIMEOUTS)
        except (obstore.exceptions.BaseError, ValueError) as error:
            raise ConfigError(f"{url}: {_first_line(error)}") from error

    def listed(self, prefix: str = "") -> dict[str, Listed]:
        """All objects whose key begins with the folder `prefix`.

        Raises:
            StoreError: the store does not answer, or refuses.
        """

        def found() -> dict[str, Listed]:
            batches = self._obstore.list(self._reading, prefix or None)
            return {
                entry["path"]: Listed(entry["size"], int(entry["last_modified"].timestamp()))
                for batch in batches
                for entry in batch
            }

        return self._tried(f"list {self.url}/{prefix}", found)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Bytes of all objects whose key begins with the folder `prefix`.

        Raises:
            StoreError: the store does not answer, or refuses.
        """
        return {key: entry.size for key, entry in self.listed(prefix).items()}

    def read(self, key: str) -> bytes:
        """An object.

        Raises:
            FileNotFoundError: there is none of this key.
            StoreError: the store does not answer, or refuses.
        """
        return self._tried(f"read {self.url}/{key}", lambda: self._whole(key))

    def download(self, key: str, path: Path, size: int) -> None:
        """Write an object of `size` bytes to a new file, in parallel pieces.

        Raises:
            FileNotFoundError: there is none of this key.
            StoreError: the store does not answer, refuses, or holds another number of bytes.
        """
        starts = range(0, size, PIECE_BYTES)
        with path.open("xb") as file, ThreadPoolExecutor(_STREAMS) as pool:

            def piece(start: int) -> None:
                count = min(PIECE_BYTES, size - start)
                data = self._tried(f"read {self.url}/{key}", lambda: self._range(key, start, count))
                os.pwrite(file.fileno(), data, start)

            list(pool.map(piece, starts))

    def create(self, key: str, content: bytes | Path) -> None:
        """Write an object that does not exist yet, given as bytes or as a file.

        A request whose answer was lost is repeated: finding exactly these bytes there is success.

        Raises:
            FileExistsError: the key holds other bytes. Nothing was changed.
            StoreError: the store does not answer, or refuses.
        """
        already = (self._obstore.exceptions.AlreadyExistsError, self._obstore.exceptions.PreconditionError)

        def put() -> None:
            data = content.read_bytes() if isinstance(content, Path) else content
            try:
                self._put(key, data, mode="create")
            except already as error:
                if self._whole(key) != data:
                    raise FileExistsError(errno.EEXIST, "exists", f"{self.url}/{key}") from error

        self._tried(f"write {self.url}/{key}", put)

    def replace(self, key: str, content: bytes) -> None:
        """Write an object, whatever is there.

        Raises:
            StoreError: the store does not answer, or refuses.
        """
        self._tried(
            f"write {self.url}/{key}",
            lambda: self._put(key, content),
        )

    def remove(self, key: str) -> None:
        """Remove an object, if it is there.

        Raises:
            StoreError: the store does not answer, or refuses.
        """

        def gone() -> None:
            with suppress(FileNotFoundError):
                self._obstore.delete(self._writing, key)

        self._tried(f"remove {self.url}/{key}", gone)

    def _put(self, key: str, data: bytes, **options: str) -> None:
        try:
            self._obstore.put(self._writing, key, data, use_multipart=False, **options)
        except FileNotFoundError as error:
            raise StoreError(f"cannot write {self.url}/{key}: there is no such bucket") from error

    def _whole(self, key: str) -> bytes:
        found = self._obstore.get(self._reading, key)
        size, data = found.meta["size"], bytes(found.bytes())
        if len(data) != size:
            raise self._obstore.exceptions.GenericError(f"{len(data)} bytes came of {size}")
        return data

    def _range(self, key: str, start: int, count: int) -> Any:
        data = self._obstore.get_range(self._reading, key, start=start, length=count)
        if len(data) != count:
            raise self._obstore.exceptions.GenericError(f"{len(data)} bytes came of {count}")
        return data

    def _tried(self, what: str, work: Callable[[], T]) -> T:
        """The result of `work`, which is repeated while the store fails and the time is not over."""
        errors = self._obstore.exceptions
        final = (
            errors.PermissionDeniedError,
            errors.UnauthenticatedError,
            errors.InvalidPathError,
            errors.NotSupportedError,
        )
        started, pause = time.monotonic(), 0.1
        while True:
            try:
                return work()
            except final as error:
                raise StoreError(f"cannot {what}: {_first_line(error)}") from error
            except errors.BaseError as error:
                if "404 Not Found" in str(error):  # of a listing: the bucket itself
                    raise StoreError(f"cannot {what}: there is no such bucket") from error
                waited = time.monotonic() - started
                if waited + pause > self.retry_s:
                    raise StoreError(
                        f"cannot {what}: {_first_line(error)}; tried for {waited:.0f} s; "
                        "run the same command again when the store answers"
                    ) from error
            time.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, 10)


def seconds_of(variable: str, default: float) -> float:
    """The value of an environment variable in seconds."""
    text = os.environ.get(variable, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = 0.0
    if not value > 0:  # nor is NaN
        raise ConfigError(f"{variable}={text!r} is not a number of seconds above 0")
    return value


def _opened(url: str, timeout_s: float) -> Any:
    """A client for the URL; the retries are ours, so that a reason for waiting is never hidden."""
    from obstore.store import MemoryStore, from_url

    if url.startswith("memory://"):
        with _memory_lock:
            return _memory.setdefault(url, MemoryStore())
    variables = (
        ("GOOGLE_BASE_URL",) if url.startswith("gs://") else ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    )
    endpoint = next(filter(None, map(os.environ.get, variables)), "")
    return from_url(
        url,
        client_options={
            "timeout": timedelta(seconds=timeout_s),
            "connect_timeout": timedelta(seconds=min(timeout_s, 10)),
            "allow_http": endpoint.startswith("http://"),
        },
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=timeout_s)},
    )


def _first_line(error: BaseException) -> str:
    """What is wrong, without the debug text that follows it."""
    return str(error).split("\n", 1)[0].strip()[:300]
