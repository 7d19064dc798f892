"""docs/metrics.md, from the explanations in common/run_metrics.py. `python -m deploy.metrics_doc > docs/metrics.md`."""

from __future__ import annotations

from common.run_metrics import METRICS

HEAD = """\
# Metrics

Every number that a run records, by its name in `metrics.jsonl`. That file has one JSON object a line:

| kind | one line | fields beside the numbers below |
|---|---|---|
| `update` | for each batch, whatever became of it | `outcome` (`committed`, `no_update` or `value_warmup`), `update` (completed updates after it), `version` (weight version after it), `time_s` |
| `evaluation` | for each evaluation of held-out prompts | `update` (when it was asked for), `version_oldest` and `version_newest` (of the weights that generated), `time_s` |
| `event` | for whatever else happened | `text`, `time_s` |

`time_s` counts from the start of the services and begins anew when a run is resumed; `update` goes back when a checkpoint
is restored, and the lines after it count. A name is missing where there is no data for it, and a number that is not finite
is `null`. What the driver serves to Prometheus is in [prometheus.md](prometheus.md).
"""  # noqa: E501
SECTIONS = {
    "batch": "The batch that was trained on",
    "staleness": "Staleness of its sampled tokens, when it was trained on",
    "policy": "The policy and its update",
    "masked": "Tokens without gradient, by staleness, rule, side and sign; missing where there are none",
    "value": "The value function",
    "time": "Where the learner's time goes",
    "eval": "Held-out prompts",
    "buffer": "The buffer, at the last look before the batch ended; counts since the start of the run",
}


def markdown() -> str:
    """The whole page."""
    parts = [HEAD]
    for prefix, title in SECTIONS.items():
        rows = [f"| `{name}` | {text} |" for name, text in METRICS.items() if name.startswith(f"{prefix}/")]
        parts.append("\n".join([f"## {title}", "", "| name | meaning |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(markdown(), end="")
