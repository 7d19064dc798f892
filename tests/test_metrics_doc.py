"""Every number that a run records is explained, in the code and on the page."""

from __future__ import annotations

import re
from pathlib import Path

from common.run_metrics import METRICS
from deploy.metrics_doc import SECTIONS, markdown

ROOT = Path(__file__).resolve().parent.parent
NAME = re.compile(rf'"((?:{"|".join(SECTIONS)})/[a-z][a-z0-9_]*)"')
SUMS = {"value/squared_error_sum", "value/tokens"}  # of losses; recorded as means, under other names


def test_page_is_what_the_code_says() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == markdown(), "out of date: python -m deploy.metrics_doc > docs/metrics.md"


def test_every_metric_is_on_the_page_in_a_whole_sentence() -> None:
    page = markdown()
    for name, text in METRICS.items():
        assert f"| `{name}` | {text} |" in page
        assert text[0].isupper() or not text[0].isalpha(), name
        assert text.endswith("."), name


def test_every_name_in_the_code_is_explained() -> None:
    found = {
        name: path.name
        for folder in ("learner", "deploy", "buffer", "actors")
        for path in (ROOT / folder).glob("*.py")
        for name in NAME.findall(path.read_text(encoding="utf-8"))
    }
    assert len(found) > 40  # the search finds what it should
    assert {name: file for name, file in found.items() if name not in METRICS and name not in SUMS} == {}
