"""Numbers as a person reads them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """`45 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def number(value: object) -> str:
    """At most four digits of a fraction, thousands of a whole number apart, a dash for what is missing."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "–" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def size(num_bytes: float) -> str:
    """`512 B`, `1.5 MiB`, `38 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024 or unit == "TiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 100 else f"{num_bytes:.3g} {unit}"


def arrow(before: float | None, after: float | None) -> str:
    """`0.400 → 0.900`, or the one there is."""
    if before is None:
        return "–"
    return f"{before:.3f}" if after is None else f"{before:.3f} → {after:.3f}"


def plural(count: int, noun: str, nouns: str = "") -> str:
    """`1 prompt`, `1,200 prompts`; `nouns` where an s does not do."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"
