"""Nothing that crosses a process is pickled: whoever can send a pickle can run code where it is read."""

import ast
from collections.abc import Iterator

import pytest
from tests.support.documents import ROOT

SOURCES = [
    file for folder in ("sync_service", "trainer", "protos") for file in sorted((ROOT / folder).rglob("*.py"))
]
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "multiprocessing"}
# Collectives of torch that pickle what ranks send each other.
COLLECTIVES = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
# It writes pickles into a digest.
DIGESTED = "trainer/deltasync/trainer/pipelines/trial.py"
WORDS = {*MODULES, *COLLECTIVES, "torch.load", "allow_pickle"}


def pickles(source: str) -> Iterator[str]:
    """What a source does with pickles."""
    if not any(word in source for word in WORDS):
        return
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from MODULES & {name.name.partition(".")[0] for name in names}
            case ast.ImportFrom(module=str(module)):
                yield from MODULES & {module.partition(".")[0]}
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in COLLECTIVES:
                yield name
            case ast.Call(func=function, keywords=keywords):
                given = {each.arg: ast.unparse(each.value) for each in keywords}
                if ast.unparse(function) == "torch.load" and given.get("weights_only") != "True":
                    yield "torch.load"
                if given.get("allow_pickle", "False") != "False":
                    yield "allow_pickle"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from multiprocessing.connection import Client",
        "dist.all_gather_object(found, mine)",
        "torch.load(file)",
        "np.load(file, allow_pickle=True)",
    ],
)
def test_a_pickle_is_found(source: str) -> None:
    assert list(pickles(source))


def test_no_source_pickles() -> None:
    assert len(SOURCES) > 100
    found = {file.relative_to(ROOT).as_posix(): list(pickles(file.read_text())) for file in SOURCES}
    assert {file: kinds for file, kinds in found.items() if kinds} == {DIGESTED: ["pickle"]}


def test_what_is_pickled_for_a_digest_is_never_read() -> None:
    source = (ROOT / DIGESTED).read_text()
    assert {name for name in ("Unpickler", "loads", "load", "dumps") if f"pickle.{name}" in source} == set()
