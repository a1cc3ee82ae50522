"""Writes the reference pages from the code: `make docs`.

Each page comes from definitions in the program: click's commands and options, the declared limits and policy
fields, the metrics, the events and the OpenAPI document. A test compares the pages with this output.
"""

import inspect
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import click
from tests.support.documents import ROOT

from deltasync.access.limits import LimitOptions
from deltasync.api.application import create_app
from deltasync.base.events import EventKind
from deltasync.base.settings import settings_in
from deltasync.cli.main import cli
from deltasync.cli.serve import serve
from deltasync.core.policy import FIELDS
from deltasync.service.options import ServiceOptions
from deltasync.status.metrics import Figures, families

FOLDER = ROOT / "sync_service/docs/reference"
_MADE = "<!-- `make docs` writes this page from the code. Do not edit it. -->\n\n"


def commands() -> str:
    """The page of all commands, their arguments and options."""
    pieces = list(_commands(cli, ("deltasync",)))
    counts = Counter(row for _, rows in pieces for row in rows)
    shared = {row: count > 9 for row, count in counts.items() if count > 3}
    text = "# Commands\n\n"
    text += "Every command that asks a service takes these options, `--by` only if it changes something:\n\n"
    text += _list(row for row, everywhere in shared.items() if everywhere)
    text += "\nCommands that name them below also take these:\n\n"
    text += _list(row for row, everywhere in shared.items() if not everywhere)
    for words, rows in pieces:
        own = _list(row for row in rows if row not in shared)
        also = ", ".join(row[0] for row in rows if not shared.get(row, True))
        text += f"\n{words}" + ("\n" if own or also else "") + own + (f"- {also}\n" if also else "")
    return text


_POLICY_FLAGS = {each.flags[0] for each in FIELDS}
# Names and values of an option, its default, and its meaning.
_Option = tuple[str, str, str]


def _list(options: Iterable[_Option]) -> str:
    lines = []
    for name, default, meaning in options:
        value = default.strip("`")
        known = "" if value in ("", "off") else " (required)" if value == "required" else f" (default {value})"
        lines.append(f"- {name}{known}: {meaning}\n")
    return "".join(lines)


def _commands(command: click.Command, names: tuple[str, ...]) -> Iterator[tuple[str, list[_Option]]]:
    """Each command: its heading and help, and its options."""
    context = click.Context(command, info_name=" ".join(names))
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if sub := command.get_command(context, name):
                yield from _commands(sub, (*names, name))
        return
    with command.make_context(" ".join(names), [], resilient_parsing=True) as context:
        usage = " ".join([*names, *command.collect_usage_pieces(context)]).replace(" [OPTIONS]", "")
        words = f"## {usage}\n\n{_paragraphs(command.help or '')}\n"
        options = [each for each in command.get_params(context) if isinstance(each, click.Option)]
        if command is serve:
            yield f"{words}\nIts options are the [settings](settings.md).\n", []
        elif {each.opts[0] for each in options} >= _POLICY_FLAGS:
            rest = [each for each in options if each.opts[0] not in _POLICY_FLAGS]
            yield f"{words}\nA flag for each [policy field](policy.md) sets it.\n", _options(rest, context)
        else:
            yield words, _options(options, context)


def _options(options: Iterable[click.Option], context: click.Context) -> list[_Option]:
    return [_option(each, context) for each in options if "--help" not in each.opts]


def _paragraphs(text: str) -> str:
    """A help text as Markdown. Keeps paragraphs; one that starts with \b becomes a code block."""
    found = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        verbatim = paragraph.removeprefix("\b\n")
        found.append(f"```text\n{verbatim}\n```" if verbatim != paragraph else " ".join(paragraph.split()))
    return "\n\n".join(found)


# Click's names of types, and words for them.
_TYPES = {
    "INTEGER RANGE": "NUMBER",
    "INTEGER": "NUMBER",
    "FLOAT RANGE": "NUMBER",
    "FLOAT": "NUMBER",
    "DIRECTORY": "DIR",
}


def _option(option: click.Option, context: click.Context) -> _Option:
    named = option.make_metavar(context)
    metavar = "" if option.is_flag or option.count else " " + _TYPES.get(named, named)
    flags = ", ".join((*option.opts, *option.secondary_opts))
    return f"`{flags}{metavar}`", _default(option, context), option.help or ""


def _default(option: click.Option, context: click.Context) -> str:
    if isinstance(option.show_default, str):
        return option.show_default
    default = option.get_default(context, call=False)
    if option.required:
        return "required"
    if default in (None, (), "") or callable(default) or str(default).startswith("Sentinel"):
        return ""
    if option.is_flag:
        return "on" if default else "off"
    return f"`{getattr(default, 'value', default)}`"


def _range(least: float, most: float | None) -> str:
    return f"At least {least:.15g}" if most is None else f"From {least:.15g} to {most:.15g}"


_READ_AT = {True: "SIGHUP", False: "start"}


def settings() -> str:
    """The page of the settings of `deltasync serve`, and of the limits for peers."""
    context = click.Context(serve, info_name="deltasync serve")
    options = {each.name: each for each in serve.get_params(context) if isinstance(each, click.Option)}
    rows: list[tuple[str, ...]] = [(*_option(options["config"], context), "start")]
    for each in settings_in(ServiceOptions):
        name, default, meaning = _option(options[each.name], context)
        meaning += "" if each.least is None else f" {_range(each.least, each.most)}."
        rows.append((f"`{each.variable}`" if each.secret else name, default, meaning, _READ_AT[each.reload]))
    limits = [
        (f"`{each.name}`", f"{each.default:,}", each.help, _READ_AT[each.reload])
        for each in settings_in(LimitOptions)
    ]
    return (
        "# Settings\n\n"
        "Each setting of `deltasync serve` is a flag, an environment variable, or a key of the TOML file that\n"
        "`--config` names. The flag wins over the variable, and the variable over the file:\n"
        "`--data-dir`, `DELTASYNC_DATA_DIR`, `data_dir`. Those marked SIGHUP change while the service\n"
        "runs. In the file, `consumers` and `limits` are tables.\n\n"
        f"{_table(('setting', 'default', 'meaning', 'read at'), rows)}\n"
        "## Limits\n\n"
        "Set one with `--limit NAME=NUMBER` or in the table `[limits]` of the file.\n\n"
        f"{_table(('limit', 'default', 'the most', 'read at'), limits)}"
    )


def policy() -> str:
    """The page of the fields of a policy."""
    rows = [
        (
            f"`{each.name}`",
            f"`{', '.join(each.flags)}`",
            each.kind.expected,
            _value(each.default),
            each.description,
        )
        for each in FIELDS
    ]
    return "# Policy fields\n\n" + _table(("field", "flag", "takes", "default", "meaning"), rows)


def _value(default: Any) -> str:
    return (
        "none"
        if default is None
        else f"`{list(default) if isinstance(default, tuple) else getattr(default, 'value', default)}`"
    )


def events() -> str:
    """The page of the events."""
    rows = [(f"`{each.label}`", logging.getLevelName(each.level), each.meaning) for each in EventKind]
    return "# Events\n\nEach is a line of the service's log and a count in `deltasync_events_total`.\n\n" + _table(
        ("event", "level", "when"), rows
    )


def metrics() -> str:
    """The page of the metrics."""
    rows = [
        (
            f"`{each.name}{_ENDS.get(each.type, '')}`",
            each.type,
            ", ".join(getattr(each, "_labelnames", ())),
            each.documentation,
        )
        for each in families(Figures(), 0)
    ]
    return (
        "# Metrics\n\n"
        "`GET /metrics` answers in Prometheus' text format. An unknown number has no sample. Metrics of releases\n"
        "and of unsent rows exist only for consumers with a policy. A histogram has the samples `_bucket`,\n"
        "`_count` and `_sum`. Counters begin at 0 when the service starts. The usual metrics of the process,\n"
        "such as `process_cpu_seconds_total`, come with them.\n\n"
        + _table(("metric", "type", "labels", "meaning"), rows)
    )


_ENDS = {"counter": "_total"}


def http() -> str:
    """The page of the HTTP routes."""
    document = create_app(Mock(), Mock(), Mock()).openapi()
    pieces = [
        "# HTTP routes\n\n"
        "`GET /` is the page for people, with its parts under `GET /page/{name}`. `GET /openapi.json` describes\n"
        "every route, body and answer for programs. All bodies are JSON.\n"
        'An error is `{"error": NAME, "message": TEXT}`: see [the table](../../../protos/README.md#errors).\n'
    ]
    rows = []
    for path, operations in document["paths"].items():
        for method, each in operations.items():
            query = [
                f"`{one['name']}`: {one.get('description', '').rstrip('.')}"
                for one in each.get("parameters", ())
                if one["in"] == "query"
            ]
            takes = "; ".join([*query, *_body(document, each)])
            rows.append((f"`{method.upper()} {path}`", each.get("description", "").partition("\n\n")[0], takes))
    return "\n".join([*pieces, _table(("route", "does", "takes"), rows)])


def _body(document: dict[str, Any], operation: dict[str, Any]) -> list[str]:
    for content in operation.get("requestBody", {}).get("content", {}).values():
        schema = content["schema"]
        for each in (schema, *schema.get("anyOf", ())):
            if name := each.get("$ref", "").rpartition("/")[2]:
                keys = document["components"]["schemas"][name].get("properties", {})
                return ["body: " + ", ".join(f"`{key}`" for key in keys)]
    return []


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(_escaped(cell) for cell in line)} |\n" for line in lines)


def _escaped(cell: str) -> str:
    """A table cell: on one line, and with bars escaped."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(cell.split()))


PAGES: dict[str, Callable[[], str]] = {
    each.__name__: each for each in (commands, settings, policy, metrics, events, http)
}


def page(name: str) -> str:
    """The content of a page's file."""
    return _MADE + PAGES[name]()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for _name in PAGES:
        (FOLDER / f"{_name}.md").write_text(page(_name))
