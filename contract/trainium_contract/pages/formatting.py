"""Format numbers and times for people."""

from __future__ import annotations

from datetime import UTC, datetime

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))


def format_duration(seconds: float | None) -> str:
    """Format as `2h5m`: the two largest units; below ten seconds with a decimal, below one in milliseconds."""
    if seconds is None:
        return "-"
    if 0 < seconds < 10:
        return f"{1000 * seconds:.0f}ms" if seconds < 0.95 else f"{seconds:.1f}s".replace(".0s", "s")
    parts: list[str] = []
    remaining = round(seconds)
    for size, unit in _UNITS:
        count, remaining = divmod(remaining, size)
        if count or parts:
            parts.append(f"{count}{unit}" if count else "")
        if len(parts) == 2:
            break
    return "".join(parts) or "0s"


def format_age(seconds: float | None) -> str:
    """Format as `5m ago`."""
    return "" if seconds is None else f"{format_duration(seconds)} ago"


def format_number(value: float | None, digits: int = 4) -> str:
    """Format a measured number."""
    return "-" if value is None else f"{value:.{digits}g}"


def format_measurement(value: float | None, standard_error: float | None) -> str:
    """Format as `0.3125 ± 0.0208`."""
    return (
        format_number(value)
        if standard_error is None
        else f"{format_number(value)} ± {format_number(standard_error, 2)}"
    )


def format_large_number(value: float) -> str:
    """Format a number for its size: 0.4, 420, 12.3k, 4.5M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.0f}" if abs(value) >= 10 or value == 0 else f"{value:.2g}"


def format_percent(value: float | None) -> str:
    """Format a share as 97.3 %."""
    return "-" if value is None else f"{100 * value:.1f} %"


def format_utc(at: float | None) -> str:
    """Format a time in UTC; empty if there is none."""
    if at is None or not -6e10 < at < 2e11:
        return ""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def pluralize(number: int, thing: str) -> str:
    """Format as 1 spare, 2 spares, 2 processes."""
    plural = f"{thing}es" if thing.endswith("s") else f"{thing}s"
    return f"{number} {thing if number == 1 else plural}"


def shorten(text: str, max_length: int) -> str:
    """Return the start of a text, on one line, cut between words if possible."""
    words = " ".join(text.split())
    if len(words) <= max_length:
        return words
    return f"{words[: max_length + 1].rpartition(' ')[0].rstrip() or words[:max_length]} …"


def format_bytes(bytes_: int) -> str:
    """Format as 1.5 GiB."""
    value = float(bytes_)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return ""
