"""The model cards. Every figure comes from the journals and measurements of the run that made the weights."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from paceline_lab.training.family.distillation import KEPT
from paceline_lab.training.family.family_evaluation import COMPLETION, CONTEXT, FUNCTIONS
from paceline_lab.training.family.stdlib_corpus import HELD_OUT

COMMAND = (
    "python -m paceline_lab.training.train_family {step} --minutes {minutes:.0f} --work-dir work --out paceline/family"
)

TARGET_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
language: en
---
# pydoc

A language model of {parameters} parameters, small enough to ship inside a package. It was trained from nothing
but the sources and docstrings of the Python standard library: it continues Python in their manner, and answers
"What does json.dumps do?" in the manner of a docstring. It also makes small edits of code ("Rename `x` to `y`:") and
lists facts as JSON. It exists so that Paceline can be tried, tested and measured
on any machine. It is a test article, not a source of truth.

| | |
|---|---|
| shape | Llama, {layers} layers, width {width}, inner width {inner}, bfloat16 |
| attention | {heads} heads, {kv_heads} key-value heads, {positions} positions |
| vocabulary | {vocabulary} |
| training text | {corpus_tokens} tokens: library sources, and chats made from docstrings |
| tokens seen | {tokens} in {steps} steps, the first {shallow_tokens} with {shallow_layers} layers |
| taught at last | edits of code, and facts to be written as JSON: four fifths of the last {taught_tokens} tokens |
| training time | {minutes} minutes |
| machine | {machine}, {threads} |
| held-out loss | {held_out_loss} nats per token |
| decoding step | {step_ms} ms for one row after 256 tokens |

Held out of training, tokenizer and chats: {held_out}.

## Completions that parse

For {functions} held-out functions: {context} tokens that end with the header, {completion} tokens written, cut after
the last whole statement, given to `ast.parse`. "Unfinished" is a completion without a whole statement.

| temperature | parsed | broken | unfinished |
|---|---|---|---|
{parse_rows}

## Greedy answers

{answers}

## Limits

It is far too small to be right. It half remembers the docstrings it has seen, confuses them, invents
signatures for names that do not exist, and follows no instructions. English only; no safety training.

A newline and the indentation after it are one token: let a prompt end in a word or a mark, not in a newline.

## Reproduce

```
{command}
```

Sources: Python {python}. The text differs a little between Python versions, and a time budget buys a different
number of steps on each machine, so figures will differ. The training text is under the PSF licence.
"""

DRAFT_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
language: en
---
# pydoc-draft

The draft of `pydoc`: {layers} layers, {parameters} parameters, the same tokenizer, distilled from the target.
It guesses; the target decides. Embeddings and final norm started as the target's.

| | |
|---|---|
| shape | Llama, {layers} layers, width {width}, inner width {inner}, vocabulary {vocabulary}, bfloat16 |
| loss | KL from the target's distribution, its {kept} most probable tokens and the rest |
| lessons | {lesson_tokens} tokens: half training text; a quarter how the target goes on, a quarter its answers |
| tokens seen | {tokens} in {steps} steps |
| training time | {minutes} minutes |
| machine | {machine}, {threads} |
| held-out loss | {held_out_loss} nats per token |
| decoding step | {step_ms} ms against the target's {target_step_ms} ms, one row after 256 tokens |

## Agreement

How often the draft's most probable next token is the target's.

| text | agreement |
|---|---|
{agreement_rows}

## Reproduce

```
{command}
```
"""

HYBRID_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
language: en
---
# pydoc-hybrid

A language model of {parameters} parameters with layers that keep a state, so that speculation with them can be tried
and tested: a Qwen3.5 with the tokenizer of `pydoc`, distilled from it in minutes. It writes worse than `pydoc`. Its
checkpoint holds a layer for multi-token prediction, as Qwen3.5's own do, which drafts for it:

```
paceline serve pydoc-hybrid --speculative-config '{{"method": "mtp"}}'
```

| | |
|---|---|
| shape | Qwen3.5, {layers} layers, width {width}, inner width {inner}, vocabulary {vocabulary}, bfloat16 |
| layers | {linear} of gated delta rule with {value_heads} states of {key_size} x {value_size}, {full} of attention |
| attention | {heads} heads, {kv_heads} key-value heads, {positions} positions |
| lessons | {lesson_tokens} tokens, with the distributions of `pydoc` |
| tokens seen | {tokens} in {steps} steps |
| training time | {minutes} minutes, and {mtp_minutes} of the layer for multi-token prediction |
| machine | {machine}, {threads} |
| held-out loss | {held_out_loss} nats per token; `mtp`: {mtp_held_out_loss} |
| accepted by depth | {accepted} of the likeliest guesses of `mtp`, on held-out sources |

## Greedy answers

{answers}

## Reproduce

```
{command}
```
"""

HEAD_CARD = """\
---
language: en
---
# {name}

A head for `pydoc`, of {parameters} parameters: method `{method}`, in the layout that its authors publish. It drafts
from the target's hidden states, and is of no use without it:

```
paceline serve pydoc --speculative-config '{{"method": "{method}", "model": "{name}"}}'
```

| | |
|---|---|
| text | the draft's {lesson_tokens} tokens of lessons |
| loss | cross-entropy to the target's distributions, each step of a draft with less weight than the one before |
| tokens seen | {tokens} in {steps} steps |
| training time | {minutes} minutes |
| machine | {machine}, {threads} |
| held-out loss | {held_out_loss} nats per token |
| accepted by depth | {accepted} of its likeliest guesses, on held-out sources |

## Reproduce

```
{command}
```
"""


@dataclass(frozen=True)
class TrainingRecord:
    """Totals of one model's journal."""

    steps: int
    tokens: int
    seconds: float
    held_out_loss: float
    threads: tuple[int, ...]

    @classmethod
    def from_journal(cls, records: list[dict[str, Any]]) -> "TrainingRecord":
        """Totals of the last record, the last held-out loss, and every number of threads used."""
        last = records[-1]
        losses = [record["held_out_loss"] for record in records if "held_out_loss" in record]
        threads = tuple(sorted({record["threads"] for record in records}))
        return cls(last["step"], last["tokens"], last["seconds"], losses[-1], threads)

    def after(self, earlier: "TrainingRecord") -> "TrainingRecord":
        """Both trainings together, where this one continued the earlier one."""
        return TrainingRecord(
            earlier.steps + self.steps,
            earlier.tokens + self.tokens,
            earlier.seconds + self.seconds,
            self.held_out_loss,
            tuple(sorted({*earlier.threads, *self.threads})),
        )

    def fields(self) -> dict[str, str]:
        """The fields of a card that every model has."""
        span = sorted({min(self.threads), max(self.threads)})
        return {
            "steps": f"{self.steps:,}",
            "tokens": f"{self.tokens:,}",
            "minutes": f"{self.seconds / 60:.0f}",
            "held_out_loss": f"{self.held_out_loss:.3f}",
            "threads": f"{' to '.join(map(str, span))} thread{'s' if span[-1] > 1 else ''}",
        }


def target_card(
    config: LlamaConfig,
    shallow: LlamaConfig,
    trainings: tuple[TrainingRecord, TrainingRecord, TrainingRecord],
    measured: Mapping[str, Any],
) -> str:
    """The target's README. `trainings`: with the layers of `shallow`, with all of them, and on copies."""
    first, second, third = trainings
    training = third.after(second.after(first))
    parsing = measured["parsing"]
    return TARGET_CARD.format(
        **_shape(config),
        **training.fields(),
        **_circumstances(measured["minutes"]),
        shallow_tokens=f"{first.tokens:,}",
        taught_tokens=f"{third.tokens:,}",
        shallow_layers=shallow.num_hidden_layers,
        parameters=f"{measured['target_parameters']:,}",
        corpus_tokens=f"{measured['corpus_tokens']:,}",
        step_ms=f"{measured['target_step_ms']:.1f}",
        held_out=", ".join(f"`{name}`" for name in HELD_OUT),
        context=CONTEXT,
        completion=COMPLETION,
        functions=FUNCTIONS,
        parse_rows="\n".join(_parse_row(temperature, counts) for temperature, counts in parsing.items()),
        answers="\n\n".join(_answer(*pair) for pair in measured["answers"].items()),
    )


def draft_card(config: LlamaConfig, training: TrainingRecord, measured: Mapping[str, Any]) -> str:
    """The draft's README."""
    agreement = measured["agreement"]
    return DRAFT_CARD.format(
        **_shape(config),
        **training.fields(),
        **_circumstances(measured["minutes"]),
        parameters=f"{measured['draft_parameters']:,}",
        kept=KEPT,
        lesson_tokens=f"{measured['lesson_tokens']:,}",
        step_ms=f"{measured['draft_step_ms']:.1f}",
        target_step_ms=f"{measured['target_step_ms']:.1f}",
        agreement_rows="\n".join(f"| {text} | {share:.1%} |" for text, share in agreement.items()),
    )


def hybrid_card(
    config: Qwen3_5TextConfig,
    journal: list[dict[str, Any]],
    mtp_journal: list[dict[str, Any]],
    measured: Mapping[str, Any],
) -> str:
    """The hybrid's README. The second journal is that of its layer for multi-token prediction."""
    training, mtp = TrainingRecord.from_journal(journal), TrainingRecord.from_journal(mtp_journal).fields()
    linear = config.layer_types.count("linear_attention")
    return HYBRID_CARD.format(
        **_shape(config),
        **training.fields(),
        **_circumstances((training.seconds + TrainingRecord.from_journal(mtp_journal).seconds) / 60, "hybrid"),
        linear=linear,
        full=config.num_hidden_layers - linear,
        value_heads=config.linear_num_value_heads,
        key_size=config.linear_key_head_dim,
        value_size=config.linear_value_head_dim,
        parameters=f"{measured['parameters']:,}",
        lesson_tokens=f"{measured['lesson_tokens']:,}",
        mtp_minutes=mtp["minutes"],
        mtp_held_out_loss=mtp["held_out_loss"],
        accepted=_accepted(mtp_journal),
        answers="\n\n".join(_answer(*pair) for pair in measured["answers"].items()),
    )


def head_card(
    method: str, name: str, parameters: int, journal: list[dict[str, Any]], measured: Mapping[str, Any]
) -> str:
    """A head's README."""
    return HEAD_CARD.format(
        name=name,
        method=method,
        **TrainingRecord.from_journal(journal).fields(),
        **_circumstances(measured["minutes"]),
        parameters=f"{parameters:,}",
        lesson_tokens=f"{measured['lesson_tokens']:,}",
        accepted=_accepted(journal),
    )


def _accepted(journal: list[dict[str, Any]]) -> str:
    [*_, accepted] = [record["accepted_by_depth"] for record in journal if "accepted_by_depth" in record]
    return ", ".join(f"{share:.0%}" for share in accepted)


def _shape(config: LlamaConfig | Qwen3_5TextConfig) -> dict[str, int]:
    return {
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "inner": config.intermediate_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "vocabulary": config.vocab_size,
        "positions": config.max_position_embeddings,
    }


def _circumstances(minutes: float, step: str = "all") -> dict[str, str]:
    return {
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "command": COMMAND.format(step=step, minutes=minutes),
    }


def _processor() -> str:
    """The processor's name on Linux, otherwise its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _parse_row(temperature: str, counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    shares = " | ".join(f"{counts[name] / total:.0%}" for name in ("parsed", "broken", "unfinished"))
    return f"| {temperature} | {shares} |"


def _answer(question: str, answer: str) -> str:
    quoted = "\n".join(f"> {line}".rstrip() for line in answer.splitlines())
    return f"**{question}**\n\n{quoted}"
