import hypothesis.strategies as st
import pytest
from hypothesis import given

from deltasync.base.arguments import NAME_PATTERN
from deltasync.base.errors import InvalidInput, Owner
from deltasync.cluster.bucket import (
    CONSUMER,
    MODEL,
    PROCESS,
    Claim,
    ClusterState,
    Member,
    key_of,
    name_of,
    pack,
    unpack,
)
from deltasync.cluster.placement import heir_of, next_after, next_steps, ranked, responsibility_for

names = st.from_regex(NAME_PATTERN, fullmatch=True)
processes = st.sets(st.sampled_from("abcdefgh"), min_size=1)
owners = st.builds(Owner, names, st.text(), st.text(), st.integers(0, 2**60))
claims = st.builds(Claim, st.none() | owners, st.integers(0, 2**60), names)


def members(of: set[str], draining: set[str] = frozenset()) -> dict[str, Member]:  # type: ignore[assignment]
    return {name: Member(name, f"{name}:1", f"http://{name}", draining=name in draining) for name in sorted(of)}


def claim(process: str, epoch: int = 1) -> Claim:
    return Claim(Owner(process, "", "", epoch), epoch)


@st.composite
def states(draw: st.DrawFn) -> ClusterState:
    of = draw(processes)
    models = st.sampled_from(["m", "n", "o"])
    some = st.builds(
        lambda who, epoch: claim(who, epoch) if who else Claim(None, epoch),
        st.sampled_from(["", *"abc"]),
        st.integers(1, 4),
    )
    own = draw(st.dictionaries(models, st.builds(lambda epoch: claim("a", epoch), st.integers(1, 4))))
    return ClusterState(
        me="a",
        confirmed=draw(st.booleans()),
        members=members(of | {"a"}, draw(st.sets(st.sampled_from("abc")))),
        claims=draw(st.dictionaries(models, some)),
        stored=draw(st.dictionaries(models, some)),
        own=own,
        open=[model for model in own if draw(st.booleans())],
        with_log=draw(st.sets(models)),
        waiting=draw(st.sets(models)),
    )


@given(names, names)
def test_names_map_one_to_one_to_keys(name: str, other: str) -> None:
    for kind in (PROCESS, MODEL, CONSUMER):
        key = key_of(kind, name)
        assert name_of(key) == (kind, name)
        assert key.count(".") == 1
        assert (key == key_of(kind, other)) == (name == other)


@pytest.mark.parametrize("key", ["model", "model.", "model.a.b", "other.a", "model.=a", ""])
def test_other_keys_are_refused(key: str) -> None:
    with pytest.raises(InvalidInput):
        name_of(key)


@given(claims, st.builds(Member, names, st.text(), st.text(), models=st.integers(0)), names)
def test_entries_are_read_as_they_were_written(written: Claim, member: Member, model: str) -> None:
    assert unpack(Claim, pack(written)) == written
    assert unpack(Member, pack(member)) == member
    assert unpack(str, pack(model)) == model


@pytest.mark.parametrize(
    "value", [b"{", b"[]", b"{}", b'{"owner": 1, "epoch": 1}', b'{"owner": null, "epoch": "1"}', b"\xff"]
)
def test_entries_that_are_not_understood_are_refused(value: bytes) -> None:
    for kind in (Claim, Member, str):
        with pytest.raises(InvalidInput):
            unpack(kind, value)


@given(names, processes, processes)
def test_only_the_models_of_those_that_go_have_another_heir(model: str, these: set[str], gone: set[str]) -> None:
    before = heir_of(model, members(these).values())
    after = heir_of(model, members(these - gone).values())
    assert before
    assert after == (before if before.name not in gone else after)
    assert (after is None) == (these <= gone)


@given(names, processes, processes, st.sampled_from("abcdefgh"))
def test_a_draining_process_is_no_heir_and_the_preferred_one_is(
    model: str, these: set[str], draining: set[str], preferred: str
) -> None:
    heir = heir_of(model, members(these, draining).values(), preferred)
    assert heir is None or not heir.draining
    assert (heir is None) == (these <= draining)
    if preferred in these - draining:
        assert heir
        assert heir.name == preferred


def test_models_are_spread() -> None:
    firsts = [ranked(f"model-{number}", "abc")[0] for number in range(300)]
    assert min(firsts.count(name) for name in "abc") > 60


@given(names, processes)
def test_all_processes_get_their_turn(model: str, these: set[str]) -> None:
    first = ranked(model, these)[0]
    turns, name = [first], first
    while (name := next_after(model, name, members(these).values())) not in ("", first):
        turns.append(name)
    assert sorted(turns) == sorted(these)


@given(states())
def test_steps_contradict_neither_each_other_nor_what_is_answered(state: ClusterState) -> None:
    steps = next_steps(state)
    assert not steps.claim.keys() & state.own.keys()
    assert steps.give_up.keys() <= state.own.keys()
    assert not steps.give_up.keys() & steps.write_again.keys()
    assert all([*steps.claim.values(), *steps.give_up.values(), *steps.write_again.values()])
    for model in steps.claim:
        answer = responsibility_for(model, state)
        assert not answer.here
        assert answer.owner is None
        assert not state.members["a"].draining
    if not state.confirmed:
        assert steps.give_up.keys() == state.own.keys()
        assert not steps.claim


@given(states(), st.sampled_from(["m", "n", "o"]))
def test_what_is_answered_names_another_process_that_is_alive(state: ClusterState, model: str) -> None:
    answer = responsibility_for(model, state)
    assert answer.reason
    if answer.owner:
        assert not answer.here
        assert answer.owner.process in state.members.keys() - {"a"}
    if answer.here:
        assert state.confirmed
        assert model in state.open or model not in {*state.own, *state.claims, *state.with_log}


@given(claims, claims)
def test_of_two_claims_all_take_the_same_one_for_the_later(one: Claim, other: Claim) -> None:
    if (one.epoch, one.process) != (other.epoch, other.process):
        assert one.counts_before(other) != other.counts_before(one)
