"""Runs in the environment of vLLM: serves a target with a drafter folder of ours and counts what is accepted.

Usage: python vllm_client.py JOB.json

The job names `target`, `drafter`, `drafts` (a block less its anchor), `prompts` (token ids),
`max_new_tokens`, `max_model_len` and `out`. The result holds the tokens behind each prompt and vLLM's own
counters of speculative decoding.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # an error is raised here, not in a child
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from vllm import LLM, SamplingParams

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Generate greedily in float32."""
    llm = LLM(
        job["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=job["max_model_len"],
        max_num_seqs=4,
        enable_prefix_caching=False,
        disable_log_stats=False,  # the counters are part of the statistics
        speculative_config={
            "method": "dflash",
            "model": job["drafter"],
            "num_speculative_tokens": job["drafts"],
        },
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"])
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        **{name: counters[f"vllm:spec_decode_{name}"] for name in COUNTERS},
    }


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(job["out"]).write_text(json.dumps(serve(job)))
