"""The points of a sweep: all combinations of the values of its parameters, put into the texts that the command was given."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from opennki._version import __version__
from opennki.errors import NkiValueError
from opennki.tools.arguments import split

TARGET, LAUNCH = "target", "launch"  # parameters that are no arguments: the target, and the launch grid
MOST_POINTS = 1_000_000
_NAME = re.compile(r"\{([A-Za-z_]\w*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)([+*])(\d+)")


@dataclass(frozen=True, slots=True)
class Point:
    """One point: its number, the value of each parameter as text, and what they make of the command's texts. `key` names the point and all
    that its result depends on."""

    number: int
    values: dict[str, str]
    attribute: str
    args: tuple[str, ...]
    target: str | None
    grid: str
    key: str

    def request(self) -> dict[str, Any]:
        """What a worker is told."""
        return {"attribute": self.attribute, "args": list(self.args), "target": self.target, "grid": self.grid}


@dataclass(frozen=True, slots=True)
class Setup:
    """What all points have in common. `checks`: those of the run, or "none" where points are traced and timed but not run. `digest`: of the
    script's text."""

    script: str
    digest: str
    checks: str = "fast"
    seed: int = 0

    def request(self) -> dict[str, Any]:
        """What a worker is told."""
        return asdict(self)


def setup_of(script: str, checks: str, seed: int) -> Setup:
    """The setup for a script."""
    return Setup(str(Path(script).resolve()), digest_of(script), checks, seed)


def digest_of(script: str) -> str:
    """SHA-256 of a file's text."""
    return hashlib.sha256(Path(script).read_bytes()).hexdigest()


def axes_of(texts: Iterable[str]) -> dict[str, list[str]]:
    """Parameters and their values, of texts such as `rows=128,256`, `tile=(1, 2),(2, 2)` or `n=128..4096*2`. Raises NkiValueError."""
    axes: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier():
            raise _wrong(text, "a parameter is NAME=VALUE,VALUE,...")
        if name in axes:
            raise _wrong(text, f"{name} is given once")
        axes[name] = list(dict.fromkeys(v for part in split(values) for v in _values(part, text)))
        if not axes[name]:
            raise _wrong(text, "a parameter has at least one value")
    return axes


def _values(part: str, text: str) -> list[str]:
    """A value, or those of a range FIRST..LAST+STEP or FIRST..LAST*FACTOR."""
    match = _RANGE.fullmatch(part)
    if match is None:
        return [part]
    value, last, step = int(match[1]), int(match[2]), int(match[4])
    if step < (2 if match[3] == "*" else 1) or (match[3] == "*" and value < 1):
        raise _wrong(text, "a range grows: FIRST..LAST+STEP, or FIRST..LAST*FACTOR with a factor of 2 or more")
    out = []
    while value <= last:
        out.append(str(value))
        value = value + step if match[3] == "+" else value * step
        if len(out) > MOST_POINTS:
            raise _wrong(text, f"a sweep has at most {MOST_POINTS} points")
    return out


def _wrong(text: str, rule: str) -> NkiValueError:
    return NkiValueError(f"--grid {text}", rule=rule)


def points_of(setup: Setup, attribute: str, args: Sequence[str], target: str | None, axes: dict[str, list[str]]) -> list[Point]:
    """All points, the last parameter changing fastest.

    `{name}` in the name of the kernel and in arguments stands for a value of the parameter `name`. `target` and `launch` are the target
    and the launch grid; parameters that stand nowhere are keyword arguments of the kernel. Raises NkiValueError.
    """
    texts = [attribute, *args, target or ""]
    used = {name for text in texts for name in _NAME.findall(text)}
    missing = sorted(used - set(axes))
    if missing:
        raise NkiValueError(f"{{{missing[0]}}} stands for no parameter", rule="a name in braces is a parameter of the sweep",
                            fix=f"give its values: --grid {missing[0]}=...")  # fmt: skip
    if target and TARGET in axes:
        raise NkiValueError("--target and --grid target=...", rule="the target is given once")
    count = prod(map(len, axes.values()))
    if count > MOST_POINTS:
        raise NkiValueError(f"a sweep of {count} points", rule=f"a sweep has at most {MOST_POINTS} points")
    keywords = [name for name in axes if name not in used and name not in (TARGET, LAUNCH)]
    points = []
    for number, chosen in enumerate(product(*axes.values())):
        values = dict(zip(axes, chosen, strict=True))

        def put(text: str, values: dict[str, str] = values) -> str:
            return _NAME.sub(lambda match: values[match[1]], text)

        aim = values.get(TARGET, put(target) if target else "") or None
        name, given = put(attribute), tuple([put(a) for a in args] + [f"{k}={values[k]}" for k in keywords])
        grid = _grid(values.get(LAUNCH, ""))
        points.append(Point(number, values, name, given, aim, grid, _key(setup, (name, given, aim, grid))))
    return points


def _grid(text: str) -> str:
    """A launch grid as the other commands take it: 4, "4,2" or "(4, 2)"."""
    return text.strip().strip("()[]").strip().rstrip(",")


def _key(setup: Setup, made: tuple[Any, ...]) -> str:
    parts = [__version__, setup.digest, setup.checks, setup.seed, *made]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
