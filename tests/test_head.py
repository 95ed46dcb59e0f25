"""The target's head: what it computes, how it is kept, and that it is found in any causal model."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support import write_target
from torch import nn
from transformers import AutoModelForCausalLM

from dflash.errors import CacheCorrupt, TargetError
from dflash.head import HeadFacts, TargetHead, embed_scale, head_of


def make_head(*, tied: bool, **facts) -> TargetHead:
    generator = torch.Generator().manual_seed(0)
    table, other = torch.randn(2, 10, 4, generator=generator)
    return TargetHead(table, table if tied else other, torch.ones(4), HeadFacts(**facts))


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_head_comes_back_whole_and_a_tied_one_is_stored_once(tmp_path, tied):
    head = make_head(tied=tied, embed_scale=2.0, logit_softcap=30.0, norm_eps=1e-5, norm_unit_offset=True)
    head.save(tmp_path / "head.safetensors")
    with safe_open(tmp_path / "head.safetensors", "pt") as file:
        assert set(file.keys()) == {"embedding", "final_norm"} | (set() if tied else {"lm_head"})
    loaded = TargetHead.load(tmp_path / "head.safetensors")
    assert loaded.tied is tied
    assert loaded.facts == head.facts
    for name in ("embedding", "lm_head", "final_norm"):
        assert torch.equal(getattr(loaded, name), getattr(head, name))
    assert (loaded.vocab_size, loaded.hidden_size) == (10, 4)


def test_a_tied_head_stays_tied_in_another_dtype():
    assert make_head(tied=True).to(torch.device("cpu"), torch.bfloat16).tied
    assert not make_head(tied=False).to(torch.device("cpu"), torch.bfloat16).tied


def test_embeddings_are_scaled_and_logits_capped_as_the_target_does():
    head = make_head(tied=False, embed_scale=3.0, logit_softcap=2.0)
    hidden = torch.randn(5, 4)
    assert torch.equal(head.embed(torch.tensor([[1, 7]])), 3.0 * head.embedding[torch.tensor([[1, 7]])])
    torch.testing.assert_close(head.logits(hidden), 2 * torch.tanh(hidden @ head.lm_head.T / 2))
    assert head.logits(100 * hidden).abs().max() <= 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:-5]),
        lambda path: save_file({"embedding": torch.ones(2, 2), "final_norm": torch.ones(2)}, path),
        lambda path: save_file({"embedding": torch.ones(2, 2)}, path, {"facts": "{}"}),
        lambda path: save_file({"embedding": torch.ones(2, 2)}, path, {"facts": '{"no": 1}'}),
        lambda path: save_file(
            {"embedding": torch.ones(2, 2), "final_norm": torch.ones(3)}, path, {"facts": "{}"}
        ),
    ],
    ids=["missing", "cut", "no facts", "no norm", "unknown fact", "shapes"],
)
def test_a_damaged_head_is_one_clear_line(tmp_path, damage):
    path = tmp_path / "head.safetensors"
    make_head(tied=True).save(path)
    damage(path)
    with pytest.raises(CacheCorrupt, match="run `dflash cache repair`") as caught:
        TargetHead.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_of_a_model_gives_its_logits(tmp_path, tied):
    model = AutoModelForCausalLM.from_pretrained(write_target(tmp_path, layers=1, tied=tied))
    head = head_of(model, model.model.norm)
    assert head.tied is tied
    ids = torch.tensor([[5, 9, 200]])
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
        torch.testing.assert_close(head.logits(out.hidden_states[-1]), out.logits)
        assert torch.equal(head.embed(ids), out.hidden_states[0])


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 8.0


class Shifted(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids).roll(1, dims=-1)


def test_the_scale_of_an_embedding_is_found_by_looking():
    assert embed_scale(nn.Embedding(9, 4)) == 1.0
    assert embed_scale(Scaled(9, 4)) == pytest.approx(8.0)


def test_an_embedding_that_is_no_scaled_table_is_refused():
    with pytest.raises(TargetError, match="Shifted is not a scaled table"):
        embed_scale(Shifted(9, 4))


def test_a_model_without_an_lm_head_is_refused(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(write_target(tmp_path, layers=1))
    with pytest.raises(TargetError, match="has no lm_head"):
        head_of(model.model, model.model.norm)
