"""The drafter's shape follows from the target; the user chooses depth, block and, if need be, the mask."""

from __future__ import annotations

import json

import pytest
from support import EOS, MASK, VOCAB, write_cache

from dflash.cache.manifest import load_manifest
from dflash.cache.parts import record_parts
from dflash.errors import CacheCorrupt, ConfigError
from dflash.train.network import TARGET_CONFIG_NAME, NetworkConfig, drafter_config


@pytest.fixture
def cache(tmp_path):
    return write_cache(tmp_path / "cache", [9])


def edit(cache, mask: int | None = MASK, **changes) -> None:
    path = cache / TARGET_CONFIG_NAME
    config = {k: v for k, v in (json.loads(path.read_text())["config"] | changes).items() if v != "absent"}
    path.write_text(json.dumps({"config": config, "mask_token_id": mask}))
    record_parts(cache, load_manifest(cache))


def shape(cache, **network):
    return drafter_config(NetworkConfig(**network), cache, load_manifest(cache))


def test_widths_come_from_the_target_and_depth_and_block_from_the_user(cache):
    config = shape(cache, layers=3, block_size=8)
    assert (config.num_hidden_layers, config.block_size) == (3, 8)
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (32, 48, 8)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert (config.vocab_size, config.num_target_layers, config.target_layer_ids) == (VOCAB, 6, (1, 3))
    assert (config.mask_token_id, config.eos_token_id, config.pad_token_id) == (MASK, EOS, 0)
    assert config.max_position_embeddings == 512


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({}, 1e4),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "partial_rotary_factor": 0.25}}, 5e5),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6},
                    "sliding_attention": {"rope_theta": 1e4},
                }
            },
            1e6,
        ),
        ({"rope_parameters": None, "rope_theta": 2e5}, 2e5),
        ({"rope_parameters": "absent", "rope_theta": "absent"}, 1e4),
    ],
)
def test_the_base_of_rope_is_the_targets_wherever_it_is_written(cache, changes, theta):
    edit(cache, **changes)
    assert shape(cache).rope_theta == theta


def test_what_a_target_leaves_out_follows_from_the_rest(cache):
    edit(cache, num_key_value_heads="absent", head_dim=None, eos_token_id=[EOS, 9])
    config = shape(cache)
    assert (config.num_key_value_heads, config.head_dim, config.eos_token_id) == (4, 8, (EOS, 9))
    edit(cache, head_dim=16)
    assert shape(cache).head_dim == 16


def test_a_mask_of_the_user_wins_and_must_be_usable(cache):
    assert shape(cache, mask_token_id=77).mask_token_id == 77
    with pytest.raises(ConfigError, match=f"mask token id {VOCAB} is outside"):
        shape(cache, mask_token_id=VOCAB)
    with pytest.raises(ConfigError, match=f"mask token id {EOS} is the target's end-of-sequence token"):
        shape(cache, mask_token_id=EOS)
    edit(cache, mask=None)
    with pytest.raises(ConfigError, match=r"no unused embedding row .* --mask-token-id"):
        shape(cache)
    assert shape(cache, mask_token_id=77).mask_token_id == 77


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"config": {}}'])
def test_a_damaged_copy_of_the_targets_config_is_one_clear_line(cache, text):
    path = cache / TARGET_CONFIG_NAME
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(CacheCorrupt, match="`dflash cache repair`"):
        shape(cache)


def test_a_drafter_without_layers_is_refused():
    with pytest.raises(ConfigError, match="--layers is 0"):
        NetworkConfig(layers=0)
