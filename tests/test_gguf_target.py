"""A GGUF file is a target like any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="the extra gguf is not installed")

from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from support import CHATML, SPECIAL
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

from dflash.errors import TargetError
from dflash.target import Target, TruncatedTarget, inspect_target, load_head, load_tokenizer

CPU = torch.device("cpu")
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), "he"]
HIDDEN, HEADS, KV_HEADS, LAYERS = 64, 4, 2, 3
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


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def tensors_of(model):
    """Under llama.cpp's names; in its queries and keys the two halves of every head are neighbours."""
    for name, value in model.model.state_dict().items():
        array = value.numpy()
        if not name.startswith("layers."):
            yield (
                {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}[name],
                array,
            )
            continue
        _, layer, part = name.removesuffix(".weight").split(".", 2)
        heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(part)
        if heads:
            halves = array.reshape(heads, 2, len(array) // heads // 2, -1)
            array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        yield f"blk.{layer}.{NAMES[part]}.weight", array


def write_gguf(path, model):
    """Matrices in Q8_0, as most files have them."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in TOKENS])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML)
    with torch.no_grad():
        for name, array in tensors_of(model):
            kind = GGMLQuantizationType.Q8_0 if array.ndim == 2 else None
            writer.add_tensor(name, quantize(array, kind) if kind else array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def file(tmp_path_factory, model):
    return str(write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf", model))


def dequantised(model):
    """The model with the weights that the file holds."""
    again = make_model()
    with torch.no_grad():
        for parameter in again.parameters():
            if parameter.ndim == 2:
                stored = quantize(parameter.numpy(), GGMLQuantizationType.Q8_0)
                parameter.copy_(torch.from_numpy(dequantize(stored, GGMLQuantizationType.Q8_0)))
    return again


def test_its_taps_are_those_of_the_dequantised_model(file, model):
    ids = np.arange(4, 17, dtype=np.int32)
    target = TruncatedTarget(file, (0, 1), dtype=torch.float32, device=CPU)
    assert len(target.model.layers) == 2
    out = torch.empty(len(ids), 2, HIDDEN)
    target.capture([ids], out)
    with torch.no_grad():
        output = dequantised(model)(torch.from_numpy(ids)[None].long(), output_hidden_states=True)
    for tap in (0, 1):
        torch.testing.assert_close(out[:, tap], output.hidden_states[tap + 1][0], atol=1e-4, rtol=1e-4)
    whole = Target(file, (0,), dtype=torch.float32, device=CPU)
    logits, _ = whole.forward(torch.from_numpy(ids).long(), whole.new_cache(), keep_logits=len(ids))
    torch.testing.assert_close(logits, output.logits[0], atol=1e-3, rtol=1e-4)
    assert load_head(file, torch.float32).tied


def test_it_has_a_tokenizer_with_the_files_template(file):
    tokenizer = load_tokenizer(file)
    assert tokenizer.chat_template == CHATML
    assert tokenizer.is_fast
    assert tokenizer.decode(tokenizer("<|im_start|>hi é")["input_ids"]).endswith("<|im_start|>hi é")


def test_its_identity_is_its_bytes(file, tmp_path):
    facts = inspect_target(file)
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size) == (LAYERS, HIDDEN, len(TOKENS))
    data = bytearray(Path(file).read_bytes())
    moved = tmp_path / "renamed.gguf"
    moved.write_bytes(data)
    assert inspect_target(str(moved)).weights_digest == facts.weights_digest
    assert inspect_target(str(moved)).config_digest == facts.config_digest
    data[-1] ^= 1
    moved.write_bytes(data)
    assert inspect_target(str(moved)).weights_digest != facts.weights_digest


def test_a_damaged_file_is_one_line(tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF but no more")
    with pytest.raises(TargetError, match="cannot load the target") as caught:
        inspect_target(str(path))
    assert "\n" not in str(caught.value)
