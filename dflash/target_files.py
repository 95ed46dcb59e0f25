"""A target's files: what it is, told by content; its configuration, tokenizer and weights.

A target is a Transformers folder, a name on the hub, or a GGUF file, which Transformers dequantises.
"""

from __future__ import annotations

import json
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from dflash.errors import TargetError, lacks_memory
from dflash.files import digest_file, digest_json

if TYPE_CHECKING:
    from collections.abc import Iterator

GGUF_SUFFIX = ".gguf"
_VOLATILE_KEYS = (
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "architectures",
    "use_cache",
)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class TargetFacts:
    """What a target is, read from its files without loading weights."""

    name: str
    revision: str | None
    config: dict[str, Any]
    """The text model's configuration."""
    config_digest: str
    weights_digest: str
    num_layers: int
    """N."""
    hidden_size: int
    """H."""
    vocab_size: int
    """V, rows of the embedding."""


def load_config(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The target's Transformers configuration.

    Raises:
        TargetError: there is no such model here or on the hub.
    """
    source, options = _source(name)
    with _one_line_errors(name):
        return AutoConfig.from_pretrained(
            source, revision=revision, trust_remote_code=trust_remote_code, **options
        )


def load_tokenizer(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The target's tokenizer.

    Raises:
        TargetError: there is none.
    """
    source, options = _source(name)
    with _one_line_errors(name):
        return AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=trust_remote_code, **options
        )


def _source(name: str) -> tuple[str, dict[str, str]]:
    """Where Transformers shall look, and what else it must be told."""
    path = Path(name)
    return (str(path.parent), {"gguf_file": path.name}) if _is_gguf(path) else (name, {})


def _is_gguf(path: Path) -> bool:
    return path.suffix == GGUF_SUFFIX and path.is_file()


@contextmanager
def _one_line_errors(name: str) -> Iterator[None]:
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    except (
        OSError,
        ValueError,
        LookupError,
        ImportError,
        RuntimeError,
        SafetensorError,
        struct.error,
    ) as error:
        if isinstance(error, RuntimeError) and lacks_memory(error):
            raise  # it is the GPU's, not the target's fault
        reason = str(error).strip().split("\n")[0]
        raise TargetError(
            f"cannot load the target {name!r}: {reason}; give a model folder or a hub name, or a GGUF file"
        ) from error
    finally:
        transformers_logging.set_verbosity(verbosity)


def load_model(kind: Any, name: str, **options: Any) -> Any:
    """Load a frozen model of a Transformers class.

    Raises:
        TargetError: it cannot be loaded, or its files lack weights, which Transformers would make up.
    """
    source, more = _source(name)
    with _one_line_errors(name):
        model, report = kind.from_pretrained(source, output_loading_info=True, **options, **more)
    if lacking := sorted(report["missing_keys"]):
        raise TargetError(
            f"the target {name!r} lacks {len(lacking)} weights, e.g. {lacking[0]}; its files are incomplete"
        )
    return model.eval().requires_grad_(False)


def inspect_target(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> TargetFacts:
    """Identify a target by content: moving or renaming its folder changes nothing.

    Raises:
        TargetError: it cannot be found, or holds no weight files.
    """
    config = load_config(name, revision=revision, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    plain = _plain_config(config)
    return TargetFacts(
        name=name,
        revision=getattr(config, "_commit_hash", None) or revision,
        config=plain,
        config_digest=digest_json(plain),
        weights_digest=_weights_digest(name, revision),
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
    )


def _plain_config(config: Any) -> dict[str, Any]:
    """The text model's configuration, and how the target is quantised, which may stand outside of it."""
    plain = {k: v for k, v in config.get_text_config().to_dict().items() if k not in _VOLATILE_KEYS}
    quantisation = config.to_dict().get("quantization_config")
    return plain if quantisation is None else plain | {"quantization_config": quantisation}


def _weights_digest(name: str, revision: str | None) -> str:
    files = _weight_files(name, revision)
    with ThreadPoolExecutor() as pool:
        return digest_json(sorted(pool.map(_file_identity, files)))


def _file_identity(path: Path) -> str:
    # The hub's cache names its blobs by their sha256, so they need not be read again.
    blob = path.resolve().name
    return blob if _SHA256.fullmatch(blob) else digest_file(path)


def _weight_files(name: str, revision: str | None) -> list[Path]:
    """Paths of the target's weight files, downloaded if need be."""
    folder = Path(name)
    if _is_gguf(folder):
        return [folder]
    if folder.is_dir():
        files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
        if not files:
            raise TargetError(f"the target folder {name} holds no *.safetensors or *.bin weights")
        return files
    with _one_line_errors(name):
        index = cached_file(name, "model.safetensors.index.json", revision=revision, **_QUIET)
        if index is None:
            return [Path(cached_file(name, "model.safetensors", revision=revision))]
        parts = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
        return [Path(cached_file(name, part, revision=revision)) for part in parts]


_QUIET = {"_raise_exceptions_for_missing_entries": False}
