"""Metrics in Prometheus' text format, as its own client writes it, but in less time and with fewer objects."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prometheus_client.utils import floatToGoString

# Values of the labels, and the number.
Sample = tuple[Sequence[str], float]


class Family(NamedTuple):
    """A metric: the lines that explain it, and those of its samples."""

    head: str
    samples: str


def gauge(name: str, text: str, labels: Sequence[str], samples: Iterable[Sample]) -> Family:
    """A number that goes up and down; `labels` are in alphabetical order."""
    return _family("gauge", f"deltasync_{name}", text, labels, samples)


def counter(name: str, text: str, labels: Sequence[str], samples: Iterable[Sample]) -> Family:
    """A number that only grows until the service starts anew; `_total` is added to its name."""
    return _family("counter", f"deltasync_{name}_total", text, labels, samples)


def text_of(*parts: Sequence[Family]) -> str:
    """Families that were made in parts, each of which has some of the samples of every family."""
    return "".join(same[0].head + "".join(part.samples for part in same) for same in zip(*parts, strict=True))


def _family(kind: str, name: str, text: str, labels: Sequence[str], samples: Iterable[Sample]) -> Family:
    names = ",".join(f'{label}="%s"' for label in labels)
    line = f"{name}{{{names}}} %s\n" if labels else f"{name} %s\n"
    lines = [line % (*map(_escaped, values), _number(number)) for values, number in samples]
    return Family(f"# HELP {name} {text}\n# TYPE {name} {kind}\n", "".join(lines))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(number: float) -> str:
    text: str = floatToGoString(number)  # type: ignore[no-untyped-call]
    return text
