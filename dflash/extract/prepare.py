"""What exists once for a cache: identity, manifest, and the parts of the target that training needs."""

from __future__ import annotations

import shutil
from typing import Any

from dflash.cache.append import append_corpus
from dflash.cache.manifest import MANIFEST_NAME, TARGET_CONFIG_NAME, Identity, Manifest, create_cache
from dflash.cache.parts import TOKENIZER_FOLDER, check_part, record_parts
from dflash.cache.writer import sweep_uncommitted
from dflash.errors import CacheMismatch, CorpusError
from dflash.extract.chat import template_digest, tokenizer_digest
from dflash.extract.codec_probe import coded_manifest
from dflash.extract.mask_token import find_mask_token
from dflash.extract.settings import ExtractConfig
from dflash.extract.token_store import TokenizedCorpus
from dflash.files import publish_json
from dflash.head import HEAD_NAME
from dflash.provenance import RECORD_NAME, write_run_record
from dflash.target import DTYPES, TargetFacts, inspect_target, load_head


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
    raw = Manifest(identity, len(corpus), dropped=corpus.dropped)
    manifest = _opened(config, coded_manifest(config, raw, corpus), corpus)
    if manifest.complete:
        return manifest
    sweep_uncommitted(config.out)
    write_run_record(config.out, "extract", config.plain())
    for name in manifest.files:
        if name != RECORD_NAME:  # written anew just now
            check_part(config.out, manifest, name)
    _save_target_parts(config, tokenizer, facts, corpus)
    return record_parts(config.out, manifest)


def _opened(config: ExtractConfig, manifest: Manifest, corpus: TokenizedCorpus) -> Manifest:
    if config.append and (config.out / MANIFEST_NAME).is_file():
        there = append_corpus(config.out, manifest, corpus.ids)
    else:
        there = create_cache(config.out, manifest)
    if there.derived and corpus.digest in there.corpora and (there.complete or not config.append):
        raise CacheMismatch(
            f"{config.out} was made by `dflash cache {there.derived}`; run that again to finish or "
            "restore it, or --append to add other data"
        )
    return there


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
    if not (config.out / TARGET_CONFIG_NAME).is_file():  # appended data must not change the mask token
        mask = find_mask_token(tokenizer, facts.config, facts.vocab_size, corpus.tokens)
        publish_json(config.out / TARGET_CONFIG_NAME, {"config": facts.config, "mask_token_id": mask})
    if not (config.out / TOKENIZER_FOLDER).is_dir():
        part = config.out / f"{TOKENIZER_FOLDER}.part"
        shutil.rmtree(part, ignore_errors=True)
        tokenizer.save_pretrained(part)
        part.rename(config.out / TOKENIZER_FOLDER)
    if not (config.out / HEAD_NAME).is_file():
        head = load_head(config.target, DTYPES[config.dtype], trust_remote_code=config.trust_remote_code)
        head.save(config.out / HEAD_NAME)
