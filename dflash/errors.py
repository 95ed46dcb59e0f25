"""Every error that a user can cause.

DflashError
├── ConfigError            a flag, a configuration key or a combination of them
├── CorpusError            training text: missing, malformed, or nothing left of it
├── TargetError            the target model cannot be loaded or does not fit
├── CacheError
│   ├── CacheIncomplete    extraction has not finished
│   ├── CacheCorrupt       bytes differ from what was committed
│   ├── CacheMismatch      another identity than the one asked for
│   └── StoreError         an object store does not answer, or refuses
├── RankFailed             another process of the run has failed, so this one ends too
├── TrainingError          training cannot go on: a loss that is not finite, say
│   └── SourceStarved      the cache that is followed has not delivered for too long
├── ServerError            a server that is asked for answers is away or refuses
└── CheckpointError        a drafter or training state that cannot be read or does not fit

The command line prints such an error as one line and exits with code 2; anything else is a fault of the
program and shows its traceback.
"""

EXIT_RANK_FAILED = 3
"""Exit code of a process that ends only because another one has failed; the launcher shows the other's."""


class DflashError(Exception):
    """Base of the errors above; its text says what, where, the value, and what to do."""


class ConfigError(DflashError):
    """A flag, a configuration key, or a combination of them is wrong."""


class CorpusError(DflashError):
    """Training text is missing, malformed, or nothing is left of it."""


class TargetError(DflashError):
    """The target model cannot be loaded, or does not fit what was asked of it."""


class CacheError(DflashError):
    """A cache cannot be used."""


class CacheIncomplete(CacheError):  # noqa: N818 - the name says a state, like FileNotFound
    """The extraction that fills this cache has not finished."""


class CacheCorrupt(CacheError):  # noqa: N818
    """Bytes differ from what was committed."""


class CacheMismatch(CacheError):  # noqa: N818
    """The cache has another identity than the one asked for."""


class StoreError(CacheError):
    """An object store that holds a cache does not answer, or refuses."""


class RankFailed(DflashError):  # noqa: N818
    """Another process of the run has failed, so this one ends too."""


class TrainingError(DflashError):
    """Training cannot go on: a loss that is not finite, say."""


class SourceStarved(TrainingError):  # noqa: N818
    """The cache that training follows has not delivered what is due, for longer than is to be waited."""


class ServerError(DflashError):
    """A server that is asked for answers is away, or refuses."""


class CheckpointError(DflashError):
    """A drafter or a training state cannot be read, or does not fit."""


def lacks_memory(error: BaseException) -> bool:
    """Whether a device or the host had too little memory; cuBLAS and pinned memory say so in words alone.

    torch's own class is known by its name, so that torch need not be loaded.
    """
    said = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")
    return type(error).__name__ == "OutOfMemoryError" or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in said)
    )
