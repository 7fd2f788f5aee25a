"""The results of a sweep as CSV, as Parquet, and as a plot."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opennki.errors import NkiValueError
from opennki.toolchain.files import write_file
from opennki.tools.sweep.plan import Point

FORMATS = ("csv", "parquet")
FIRST = ("status", "latency_us", "bound_by", "wall_s", "peak_bytes", "grown_bytes")  # columns that stand before the others
LAST = ("warnings", "error")
MOST_SERIES = 12  # lines of a plot
MOST_TICKS = 12  # that stand at the values of the points
_LIBRARIES = {"parquet": "pyarrow", "plot": "matplotlib"}

Row = dict[str, Any]


def has(what: str) -> bool:
    """Whether the library for a format (parquet, plot) is installed."""
    return _LIBRARIES.get(what) is None or importlib.util.find_spec(_LIBRARIES[what]) is not None


def library(what: str, module: str) -> Any:
    """A module of the library for a format. Raises NkiValueError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise NkiValueError(f"{_LIBRARIES[what]} is not installed", rule=f"a {what} is written with {_LIBRARIES[what]}",
                            fix="pip install 'opennki[sweep]'") from None  # fmt: skip


def rows_of(points: Sequence[Point], results: dict[str, Row]) -> list[Row]:
    """The rows of the points that are done, in the order of the points: number, parameters, result."""
    out = []
    for point in points:
        result = results.get(point.key)
        if result is not None:
            out.append({"point": point.number, **{k: _number(v) for k, v in point.values.items()},
                        **{k: v for k, v in result.items() if k != "key" and k not in point.values}})  # fmt: skip
    return out


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def columns(points: Sequence[Point], rows: Sequence[Row]) -> list[str]:
    """Names of the columns, in order."""
    given = ["point", *(points[0].values if points else ())]
    there = dict.fromkeys(name for row in rows for name in row)
    middle = [n for n in (*FIRST, *there) if n in there and n not in LAST and n not in given]
    return [*given, *dict.fromkeys(middle), *(n for n in LAST if n not in given)]


def write_csv(path: Path, names: Sequence[str], rows: Sequence[Row]) -> None:
    """Write a CSV file, whole or not at all."""
    out = io.StringIO()
    writer = csv.DictWriter(out, names, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_file(path, out.getvalue().encode("utf-8"), "the results of a sweep")


def write_parquet(path: Path, names: Sequence[str], rows: Sequence[Row]) -> None:
    """Write a Parquet file, whole or not at all: numbers as int64 or double, columns of anything else as text."""
    arrow, parquet = library("parquet", "pyarrow"), library("parquet", "pyarrow.parquet")
    arrays = []
    for name in names:
        values = [row.get(name) for row in rows]
        kinds = {type(v) for v in values if v is not None}
        if kinds <= {int} and kinds:
            arrays.append(arrow.array(values, arrow.int64()))
        elif kinds <= {int, float} and kinds:
            arrays.append(arrow.array([None if v is None else float(v) for v in values], arrow.float64()))
        else:
            arrays.append(arrow.array([None if v is None else str(v) for v in values], arrow.string()))
    sink = arrow.BufferOutputStream()
    parquet.write_table(arrow.table(arrays, names=list(names)), sink)
    write_file(path, sink.getvalue().to_pybytes(), "the results of a sweep")


def write_plot(path: Path, axes: dict[str, list[str]], rows: Sequence[Row], title: str) -> bool:
    """Draw the estimate over the numeric parameter with the most values, a line for each combination of the others, as SVG. False where
    there is nothing to draw."""
    figure_of = library("plot", "matplotlib.figure").Figure
    matplotlib = library("plot", "matplotlib")
    good = [row for row in rows if isinstance(row.get("latency_us"), (int, float))]
    numeric = [n for n in axes if all(isinstance(_number(v), (int, float)) for v in axes[n])]
    across = max(numeric, key=lambda n: len(axes[n]), default=None)
    if not good:
        return False
    with matplotlib.rc_context({"svg.hashsalt": "opennki", "svg.fonttype": "none"}):
        figure = figure_of(figsize=(9, 5.5), layout="constrained")
        plot = figure.subplots()
        if across is None:
            names = [", ".join(str(row[n]) for n in axes) or "all" for row in good]
            plot.barh(names, [row["latency_us"] for row in good])
            plot.invert_yaxis()
            plot.set_xlabel("latency (us, estimate)")
        else:
            _lines(plot, across, [n for n in axes if n != across and len(axes[n]) > 1], good)
        plot.set_title(title)
        plot.grid(True, which="both", alpha=0.3)
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": "opennki"})
    write_file(path, out.getvalue(), "the plot of a sweep")
    return True


def _lines(plot: Any, across: str, others: list[str], rows: Sequence[Row]) -> None:
    series: dict[tuple[Any, ...], list[tuple[Any, float]]] = {}
    for row in rows:
        series.setdefault(tuple(row[n] for n in others), []).append((row[across], row["latency_us"]))
    for values, places in list(series.items())[:MOST_SERIES]:
        places.sort()
        label = ", ".join(f"{n}={v}" for n, v in zip(others, values, strict=True))
        plot.plot([x for x, _ in places], [y for _, y in places], marker="o", label=label or None)
    every = [place for places in series.values() for place in places]
    for scale, numbers in ((plot.set_xscale, [x for x, _ in every]), (plot.set_yscale, [y for _, y in every])):
        if min(numbers) > 0 and max(numbers) >= 8 * min(numbers):
            scale("log", base=2)
    ticks = sorted({x for x, _ in every})
    if plot.get_xscale() == "log" and len(ticks) <= MOST_TICKS:
        plot.set_xticks(ticks, [str(x) for x in ticks])
        plot.minorticks_off()
    plot.set_xlabel(across)
    plot.set_ylabel("latency (us, estimate)")
    if others:
        more = len(series) - MOST_SERIES
        plot.legend(fontsize="small", title=f"the first {MOST_SERIES} of {len(series)}" if more > 0 else None)
