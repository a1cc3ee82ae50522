"""Settings: fields of a dataclass, each declared once with its default, its range and its meaning."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

T = TypeVar("T")
# Makes a value from a table of a TOML file and from flags NAME=VALUE, or raises InvalidInput.
ReadTable = Callable[[object, Mapping[str, str]], Any]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A declared setting.

    Attributes:
        help: its meaning.
        flag: its flag; empty = its name.
        least: the smallest value.
        most: the largest value.
        metavar: placeholder for a value in `--help`; DIR also says that a path is a folder.
        shown: the default in words, where the value itself does not explain it.
        read: reads a setting that is a table.
        reload: whether a running service takes a new value on SIGHUP.
        secret: whether it has no flag, because every user of a machine can read arguments.
        name: the field, which is also the key in a TOML file.
        kind: the type of the values other than None.
        default: the value if nobody sets it.
    """

    help: str
    flag: str = ""
    least: Any = None
    most: Any = None
    metavar: str | None = None
    shown: str = ""
    read: ReadTable | None = None
    reload: bool = False
    secret: bool = False
    name: str = ""
    kind: Any = None
    default: Any = None

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return f"DELTASYNC_{self.flag[2:].replace('-', '_').upper()}"


def setting(default: T, text: str, **more: Any) -> T:
    """Declare a dataclass field as a setting; `more` are attributes of `Setting`."""
    declared = Setting(help=text, **more)
    return field(default=default, repr=not declared.secret, metadata={"setting": declared})


def settings_in(options: type) -> tuple[Setting, ...]:
    """The settings that a dataclass declares."""
    kinds = get_type_hints(options)
    return tuple(
        replace(
            declared,
            name=each.name,
            flag=declared.flag or f"--{each.name.replace('_', '-')}",
            kind=_without_none(kinds[each.name]),
            default=each.default,
        )
        for each in fields(options)
        if (declared := each.metadata.get("setting"))
    )


def _without_none(kind: Any) -> Any:
    kinds = get_args(kind)
    return kinds[0] if NoneType in kinds else kind


def changed(before: object, after: object) -> tuple[list[str], list[str]]:
    """Names of settings with another value: those that a running service takes, and those that need a start."""
    differing = [each for each in settings_in(type(before)) if vars(before)[each.name] != vars(after)[each.name]]
    return [each.name for each in differing if each.reload], [each.name for each in differing if not each.reload]
