"""A consumer's lag as text, made of the service's JSON answer."""

from typing import Any

from deltasync.core.policy import Policy
from deltasync.core.words import counted

Lag = dict[str, Any]
Line = tuple[Any, ...]

_TITLES = ("", "offset", "versions", "rows", "bytes", "seconds")
_RELEASE_TITLES = ("", "release", *_TITLES[2:])
_UNSENT_TITLES = ("unsent norm", "unsent share")


def lag_text(answer: Lag) -> str:
    """What the answer says: the state, the last release where there is one, and a table of replicas and tables."""
    head = f"consumer {answer['consumer']}  model {answer['model']}  head {answer['head']}  {answer['state']}"
    return "\n".join([head, answer["reason"], *_aligned(_facts(answer)), "", *_table(answer)])


def _facts(answer: Lag) -> list[tuple[str, str]]:
    facts = [("policy", Policy.from_dict(answer["policy"]).words)]
    facts += _release_facts(answer, answer["release"]) if answer["release"] else []
    if (behind := answer["head_seconds_behind_events"]) is not None:
        facts.append(("events", _events(answer["lag"]["seconds_behind_events"], behind)))
    if answer["damages"]:
        facts.append(("damages", f"{counted(answer['damages'], 'table')} of replicas since the service started"))
    facts += [(f"replica {replica['replica']}", replica["reason"]) for replica in answer["replicas"]]
    return [(name, text) for name, text in facts if text]


def _events(held: float | None, head: float) -> str:
    holds = "is not known" if held is None else f"{held} seconds ago"
    return f"newest in the newest version: {head} seconds ago; in what the last replica holds: {holds}"


def _release_facts(answer: Lag, release: Lag) -> list[tuple[str, str]]:
    lag = answer["lag"]
    known = lag["unsent_norm"] is not None
    # All hold it after a restart, or while no replica is connected.
    until = "next release is made" if answer["offset"] == release["number"] else "newest release is applied"
    unsent = f"norm {_norm(lag)}, {_share(lag)} of the tables'" if known else f"not known before the {until}"
    return [
        ("release", f"{release['number']} of version {release['version']}, {release['seconds_ago']} seconds ago"),
        ("", release["reason"]),
        ("took", _amount(release["rows"], release["bytes"], release["norm"])),
        ("left", _amount(release["left_rows"], release["left_bytes"], release["left_norm"])),
        ("oldest row", f"{answer['oldest_row_seconds']} seconds unsent"),
        ("unsent", unsent),
    ]


def _amount(rows: int, size: int, norm: float) -> str:
    return f"{counted(rows, 'row')}, {counted(size, 'byte')}, norm {norm:.4g}"


def _aligned(facts: list[tuple[str, str]]) -> list[str]:
    width = max((len(name) for name, _ in facts), default=0) + 2
    return [f"{name:<{width}}{text}" for name, text in facts]


def _table(answer: Lag) -> list[str]:
    ranked = answer["release"] is not None
    lines: list[Line] = [(*(_RELEASE_TITLES if ranked else _TITLES), *_UNSENT_TITLES)]
    lines.append(("all replicas", answer["offset"], *_numbers(answer["lag"])))
    lines += [(_name(replica), replica["offset"], *_numbers(replica["lag"])) for replica in answer["replicas"]]
    for table in answer["tables"]:
        seconds = table["oldest_row_seconds"] if ranked else ""
        lines.append((table["table"], "", "", table["rows"], table["bytes"], seconds, _norm(table), _share(table)))
    return _columns(lines if ranked else [line[: len(_TITLES)] for line in lines])


def _columns(lines: list[Line]) -> list[str]:
    width = max(len(str(line[0])) for line in lines)
    return [f"{line[0]!s:<{width}}" + "".join(f"{cell!s:>14}" for cell in line[1:]) for line in lines]


def _name(replica: Lag) -> str:
    name, state = replica["replica"], replica["state"]
    return f"{name}" if state == "connected" else f"{name} ({state})"


def _numbers(lag: Lag) -> Line:
    return lag["versions"], lag["rows"], lag["bytes"], lag["seconds"], _norm(lag), _share(lag)


def _norm(lag: Lag) -> str:
    return "" if lag["unsent_norm"] is None else f"{lag['unsent_norm']:.4g}"


def _share(lag: Lag) -> str:
    return "" if lag["unsent_share"] is None else f"{100 * lag['unsent_share']:.3g} %"
