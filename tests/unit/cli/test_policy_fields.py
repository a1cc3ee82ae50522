"""A field of a policy is declared once: whatever else speaks of it says the same."""

import json
import re
from typing import Any

import click
import pytest
from tests.support.documents import document

from deltasync.api.requests import ConsumerBody
from deltasync.cli.consumers import create_consumer, policy_of, policy_options, update_consumer
from deltasync.core.policy import FIELDS, Amount, Bytes, Flag, Kind, OneOf, Patterns, Policy, PolicyField, Seconds
from deltasync.core.tables import TableSpec
from deltasync.core.value_types import ValueType

PAGE = document("sync_service/docs/policies.md").text
each_field = pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)


def another(kind: Kind) -> Any:
    """A value of a kind that is no field's default."""
    if isinstance(kind, OneOf):
        return list(kind.members)[-1]
    return {Patterns: ("user*", "item"), Flag: True, Seconds: 2.5, Amount: 0.5, Bytes: 4000}[type(kind)]


def with_another(field: PolicyField) -> Policy:
    policy = Policy(**{field.name: another(field.kind)})
    assert getattr(policy, field.name) == another(field.kind) != field.default
    return policy


def options_of(command: click.Command) -> dict[str | None, click.Option]:
    return {option.name: option for option in command.params if isinstance(option, click.Option)}


@click.command()
@policy_options
def everything(**options: Any) -> Policy:
    return policy_of(options)


@each_field
def test_a_field_goes_through_json(field: PolicyField) -> None:
    policy = with_another(field)
    assert Policy.from_dict(json.loads(json.dumps(policy.as_dict()))) == policy
    assert policy.description.startswith(field.name)


@each_field
def test_a_field_can_be_given_by_each_of_its_flags(field: PolicyField) -> None:
    policy = with_another(field)
    described = policy.as_dict()[field.name]
    values = described if isinstance(described, list) else [described]
    for flag in field.flags:
        arguments = [flag] if described is True else [each for value in values for each in (flag, str(value))]
        assert everything.main(arguments, standalone_mode=False) == policy


def test_rows_and_a_share_are_told_apart() -> None:
    for written, said in {
        "10": "top_k=10 rows",
        "1": "top_k=1 row",
        "0.1": "top_k=10 % of the changed rows",
        "1e-3": "top_k=0.1 % of the changed rows",
    }.items():
        assert everything.main(["--top-k", written], standalone_mode=False).description == said
    for written in ("1.0", "10.0", "1e1"):
        with pytest.raises(click.UsageError, match="expected a whole number of rows such as 10, without a point"):
            everything.main(["--top-k", written], standalone_mode=False)
    shown = " ".join(everything.get_help(click.Context(everything)).split())
    assert "--top-k ROWS|SHARE" in shown
    assert "A whole number means rows per release, a number below 1 a share" in shown


def test_commands_have_the_declared_options_with_their_help() -> None:
    flags = {flag: field.description.replace("`", "") for field in FIELDS for flag in field.flags}
    found = {flag: option for option in options_of(everything).values() for flag in option.opts}
    assert found.keys() == flags.keys()
    assert all((found[flag].help or "").startswith(words) for flag, words in flags.items())
    for command in (create_consumer, update_consumer):
        assert options_of(command).keys() >= options_of(everything).keys()


@each_field
def test_a_body_over_http_is_described_by_the_declaration(field: PolicyField) -> None:
    described = ConsumerBody.model_json_schema()["properties"]["policy"]["properties"][field.name]
    assert described["description"] == field.description
    assert described["default"] == Policy().as_dict()[field.name]
    types = {"array": list, "boolean": bool, "number": float, "integer": int}
    value = with_another(field).as_dict()[field.name]
    if "enum" in described:
        assert value in described["enum"]
        return
    names = [each["type"] for each in described.get("anyOf", [described])]
    assert type(value) in [types[name] for name in names if name != "null"]
    assert ("null" in names) == (field.default is None)


def test_the_document_speaks_of_fields_that_there_are() -> None:
    headings = re.findall(r"(?m)^## (.*)$", PAGE)
    named = {name for heading in headings for name in re.findall(r"`(\w+)`", heading)}
    assert named
    assert named <= {field.name for field in FIELDS}


def test_the_document_s_table_of_value_types_is_that_of_the_code() -> None:
    section = PAGE.partition("\n## Value types\n")[2].partition("\n## ")[0]
    rows = re.findall(r"(?m)^\| (`.*?) \| (\d+) \|", section)
    documented = {name: int(size) for names, size in rows for name in re.findall(r"`([\w-]+)`", names)}
    table = TableSpec("user", 1, 64)
    assert documented == {each.value: Policy(value_type=each).row_bytes(table) for each in ValueType}
