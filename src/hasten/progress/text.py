"""Text of readings: short numbers, clock times, and the fields of a progress line."""

from __future__ import annotations

from hasten.progress.meter import MeterReading

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def short_number(number: float) -> str:
    """Return `number` with three digits and a prefix: 1234567 is 1.23M."""
    for factor, prefix in _PREFIXES:
        if abs(number) >= factor:
            return f"{number / factor:.3g}{prefix}"
    return f"{number:.3g}"


def clock_time(seconds: float | None) -> str:
    """Return `seconds` as m:ss or h:mm:ss; a question mark if unknown."""
    if seconds is None:
        return "?"
    whole_seconds = round(seconds)
    hours, seconds_left = divmod(whole_seconds, 3600)
    minutes, left = divmod(seconds_left, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{left:02d}"
    return f"{minutes}:{left:02d}"


def value_text(value: float | str) -> str:
    """Return one displayed value: four significant digits, or the string itself."""
    return value if isinstance(value, str) else f"{value:.4g}"


def gigabytes_text(size: int) -> str:
    """Return `size` in GB with three significant digits."""
    return f"{size / 1e9:.3g}"


def line_fields(reading: MeterReading) -> list[str]:
    """Return the fields of a progress line after its bar."""
    shown_fields = []
    for value_name, value in reading.values.items():
        shown_fields.append(f"{value_name} {value_text(value)}")
    if reading.samples_per_s > 0:
        shown_fields.append(f"{short_number(reading.samples_per_s)} samples/s")
    elif reading.steps_per_s >= 1 or reading.steps_per_s == 0:
        shown_fields.append(f"{short_number(reading.steps_per_s)} it/s")
    else:
        shown_fields.append(f"{short_number(1 / reading.steps_per_s)} s/it")
    if reading.tokens_per_s > 0:
        shown_fields.append(f"{short_number(reading.tokens_per_s)} tok/s")
    if reading.mfu is not None:
        shown_fields.append(f"mfu {reading.mfu:.1%}")
    if reading.memory_bytes is not None:
        of_total = ""
        if reading.memory_total_bytes:
            of_total = f"/{gigabytes_text(reading.memory_total_bytes)}"
        shown_fields.append(f"mem {gigabytes_text(reading.memory_bytes)}{of_total} GB")
    eta = "" if reading.total is None else f"<{clock_time(reading.eta_s)}"
    shown_fields.append(f"{clock_time(reading.elapsed_s)}{eta}")
    return shown_fields


def step_count(reading: MeterReading) -> str:
    """Return the number of steps, with the total and the percentage if known."""
    if reading.total is None:
        return str(reading.step)
    percent = 100 * reading.step // max(reading.total, 1)
    return f"{reading.step}/{reading.total} {percent}%"


def progress_line(reading: MeterReading) -> str:
    """Return the whole reading as one line of plain text."""
    head = f"{reading.desc} " if reading.desc else ""
    tail = f" | {reading.hint}" if reading.hint else ""
    return f"{head}{step_count(reading)} | {' | '.join(line_fields(reading))}{tail}"
