"""What exists once for a cache: identity, manifest, and the parts of the target that training needs."""

from __future__ import annotations

import shutil
from typing import Any

from dflash.cache.manifest import TARGET_CONFIG_NAME, Identity, Manifest, create_cache
from dflash.cache.writer import sweep_uncommitted
from dflash.errors import CorpusError
from dflash.extract.chat import template_digest, tokenizer_digest
from dflash.extract.mask_token import find_mask_token
from dflash.extract.settings import ExtractConfig
from dflash.extract.token_store import TokenizedCorpus
from dflash.files import publish_json
from dflash.head import HEAD_NAME
from dflash.provenance import write_run_record
from dflash.target import DTYPES, TargetFacts, inspect_target, load_head

TOKENIZER_NAME = "tokenizer"


def prepare(config: ExtractConfig, tokenizer: Any, corpus: TokenizedCorpus) -> Manifest:
    """Create the cache or find the same one to resume, with what training needs of the target.

    Raises:
        CorpusError: the corpus holds tokens that the target does not know.
        TargetError: the target cannot be loaded.
        CacheError: the folder holds another cache or something else.
    """
    facts = inspect_target(config.target, trust_remote_code=config.trust_remote_code)
    if int(corpus.tokens.max()) >= facts.vocab_size:
        raise CorpusError(
            f"the corpus has token id {int(corpus.tokens.max())}, the target's embedding "
            f"{facts.vocab_size} rows; the tokenizer is another model's"
        )
    identity = _identity(config, tokenizer, corpus, facts)
    manifest = create_cache(config.out, Manifest(identity, len(corpus), dropped=corpus.dropped))
    if manifest.complete:
        return manifest
    sweep_uncommitted(config.out)
    write_run_record(config.out, "extract", config.plain())
    _save_target_parts(config, tokenizer, facts, corpus)
    return manifest


def _identity(config: ExtractConfig, tokenizer: Any, corpus: TokenizedCorpus, facts: TargetFacts) -> Identity:
    return Identity(
        target=facts.name,
        revision=facts.revision,
        config_digest=facts.config_digest,
        weights_digest=facts.weights_digest,
        tokenizer_digest=tokenizer_digest(tokenizer),
        template_digest=template_digest(tokenizer),
        taps=config.taps_of(facts.num_layers),
        num_target_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        dtype=config.dtype,
        codec="raw",
        bucket_edges=config.edges,
        max_length=config.max_length,
        corpus_digest=corpus.digest,
    )


def _save_target_parts(
    config: ExtractConfig, tokenizer: Any, facts: TargetFacts, corpus: TokenizedCorpus
) -> None:
    mask = find_mask_token(tokenizer, facts.config, facts.vocab_size, corpus.tokens)
    publish_json(config.out / TARGET_CONFIG_NAME, {"config": facts.config, "mask_token_id": mask})
    if not (config.out / TOKENIZER_NAME).is_dir():
        part = config.out / f"{TOKENIZER_NAME}.part"
        shutil.rmtree(part, ignore_errors=True)
        tokenizer.save_pretrained(part)
        part.rename(config.out / TOKENIZER_NAME)
    if not (config.out / HEAD_NAME).is_file():
        head = load_head(config.target, DTYPES[config.dtype], trust_remote_code=config.trust_remote_code)
        head.save(config.out / HEAD_NAME)
