"""The model card of an export: what the drafter is, how it is served, what it accepts, how it came about.

Every figure is read from the run's files; a section whose file is missing is left out.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dflash.drafter import DrafterConfig
from dflash.export.history import History
from dflash.pretrained import parameter_count

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_TARGET = "TARGET"
"""Stands for a target that is not known."""


def model_card(config: DrafterConfig, layout: str, target: str | None, history: History) -> str:
    """The whole README.md.

    Args:
        config: The drafter.
        layout: Of the export.
        target: Name of the target, if known.
        history: What is known of the run.
    """
    parts = [
        _front_matter(target),
        f"# DFlash drafter for {target or 'its target'}",
        _about(config, layout),
        _drafter_table(config),
        "## Serving",
        *_serving(config, layout, target or _TARGET),
        *_acceptance(history),
        *_recipe(history),
        *_corpus(history),
        *_mix(history),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(target: str | None) -> str:
    lines = ["---", "tags:", "- speculative-decoding", "- dflash"]
    if target and _HUB_NAME.fullmatch(target) and not Path(target).exists():
        lines += [f"base_model: {target}"]
    return "\n".join([*lines, "---"])


def _about(c: DrafterConfig, layout: str) -> str:
    return (
        "A block drafter for speculative decoding: from the target's hidden states it drafts "
        f"{c.block_size - 1} tokens in one pass, which the target verifies in one pass of its own. Output "
        f"stays the target's. This folder is in the layout `{layout}` of `dflash export`; `dflash import` "
        "reads it back."
    )


def _drafter_table(c: DrafterConfig) -> str:
    return _table(
        ("drafter", ""),
        [
            ("block size B, the anchor included", c.block_size),
            ("drafts a pass, B - 1", c.block_size - 1),
            ("parameters", f"{parameter_count(c):,}"),
            ("layers, hidden size, MLP", f"{c.num_hidden_layers}, {c.hidden_size}, {c.intermediate_size}"),
            ("tapped layers of the target (0-based)", ", ".join(map(str, c.target_layer_ids))),
            ("layers of the target", c.num_target_layers),
            ("mask token id", c.mask_token_id),
        ],
    )


def _serving(c: DrafterConfig, layout: str, target: str) -> list[str]:
    """A section a client, each with a command that makes its layout where this folder has another."""
    sglang = [
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH \\",
        f"  --speculative-draft-model-path {_converted(layout, 'zlab')} \\",
        f"  --speculative-num-draft-tokens {c.block_size}",
    ]
    transformers = _convert(layout, "transformers")
    return [
        "Below, `.` is this folder.",
        "### Transformers (5.24 or newer)",
        *([_shell(transformers)] if transformers else []),
        _python(_converted(layout, "transformers"), target),
        "### vLLM",
        _shell(_vllm(c, layout, target)),
        f"`num_speculative_tokens` is B - 1 = {c.block_size - 1}.",
        "### SGLang",
        _shell([*_convert(layout, "zlab"), *sglang]),
        f"`--speculative-num-draft-tokens` is B = {c.block_size}, the anchor included.",
    ]


def _convert(layout: str, wanted: str) -> list[str]:
    return [] if layout == wanted else [f"dflash export . --to {wanted} --out {_converted(layout, wanted)}"]


def _converted(layout: str, wanted: str) -> str:
    return "." if layout == wanted else f"../drafter-{wanted}"


def _vllm(c: DrafterConfig, layout: str, target: str) -> list[str]:
    if layout == "speculators":
        return ["vllm serve .  # names the target itself"]
    settings = {
        "method": "dflash",
        "model": _converted(layout, "zlab"),
        "num_speculative_tokens": c.block_size - 1,
    }
    return [*_convert(layout, "zlab"), f"vllm serve {target} --speculative-config '{json.dumps(settings)}'"]


def _python(folder: str, target: str) -> str:
    lines = [
        "from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer",
        "",
        f'target = AutoModelForCausalLM.from_pretrained("{target}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{target}")',
        f'drafter = AutoModel.from_pretrained("{folder}", dtype=target.dtype)',
        'inputs = tokenizer("Why is the sky blue?", return_tensors="pt")',
        'output = target.generate(**inputs, assistant_model=drafter, speculation_type="dflash")',
    ]
    return "\n".join(["```python", *lines, "```"])


def _shell(lines: Sequence[str]) -> str:
    return "\n".join(["```sh", *lines, "```"])


def _acceptance(history: History) -> list[str]:
    """The walk over held-out samples of the cache, and what each slot accepted."""
    walk, run = history.walk, history.run
    if not walk or run is None:
        return []
    rows: list[tuple[Any, ...]] = [
        (f"up to {edge} tokens", _number(tau), _number(anchor))
        for edge, tau, anchor in zip(
            run.bucket_edges, walk["walk_tau_by_bucket"], walk["heldout_anchor_tau_by_bucket"], strict=False
        )
        if tau is not None
    ]
    rows.append(("all", _number(walk["walk_tau"]), _number(walk["heldout_anchor_tau"])))
    about = (
        f"Tokens a verification pass adds, over {walk['heldout_responses']:,} held-out answers at step "
        f"{walk['step']:,}: the walk is what a server sees; the average over all anchors is higher."
    )
    slots = " ".join(_number(share) for share in walk["heldout_accuracy"])
    return [
        "## Acceptance",
        about,
        _table(("length", "walk tau", "anchor tau"), rows),
        f"Slots 1 to B - 1, right where all before were right: {slots}.",
    ]


def _recipe(history: History) -> list[str]:
    """Settings of the training and what it ended with."""
    record = history.record
    config = record.get("config")
    if not isinstance(config, dict):
        return []
    rows = [
        row for key, value in config.items() if key not in _NOT_OF_THE_RECIPE for row in _flat(key, value)
    ]
    if last := history.last_step:
        rows += [("steps done", f"{last['step']:,}"), ("loss at the end", _number(last["loss"]))]
    rows += [
        (f"version of {name}", version) for name, version in (record.get("versions") or {}).items() if version
    ]
    parts = ["## Recipe", _table(("setting", "value"), rows)]
    if len(argv := record.get("argv") or []) > 1:
        parts.append(_shell([shlex.join(["dflash", *map(str, argv[1:])])]))
    return parts


_NOT_OF_THE_RECIPE = ("drafter", "bucket_edges", "cache_digest")
"""Keys of the record that stand elsewhere on the card."""


def _flat(key: str, value: Any) -> Iterable[tuple[str, Any]]:
    """Rows of a setting; settings inside a setting are joined by a dot, unset ones are left out."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(f"{key}.{name}", inner)
    elif value is not None:
        yield key, value


def _corpus(history: History) -> list[str]:
    manifest = history.manifest
    if manifest is None:
        return []
    identity = manifest.identity
    rows: list[tuple[Any, ...]] = [
        ("data", ", ".join(history.data)),
        ("conversations", f"{manifest.expected_samples:,}"),
        *((f"left out: {reason}", f"{count:,}") for reason, count in sorted(manifest.dropped.items())),
        ("longest, tokens", f"{identity.max_length:,}"),
        ("hidden states", f"{identity.dtype}, codec {identity.codec}"),
        ("digest of the corpus", identity.corpus_digest),
        ("digest of the target's weights", identity.weights_digest),
        ("digest of the chat template", identity.template_digest),
    ]
    return ["## Corpus", _table(("corpus", ""), [row for row in rows if row[1]])]


def _mix(history: History) -> list[str]:
    mix, run = history.last_step.get("mix"), history.run
    if not mix or run is None:
        return []
    rows = [
        (f"up to {edge} tokens", f"{owed:.2%}", f"{drawn:.2%}")
        for edge, owed, drawn in zip(run.bucket_edges, mix["quota"], mix["shares"], strict=False)
    ]
    return [
        "## Length mix",
        f"Share of the {mix['tokens']:,} tokens drawn, by length of the conversation.",
        _table(("length", "quota", "drawn"), rows),
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in lines)


def _cell(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
