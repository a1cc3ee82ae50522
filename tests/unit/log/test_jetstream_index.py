"""The index of a log among brokers, against a plain dictionary, for any order of operations."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from deltasync.log.jetstream_store import Index, put_note
from deltasync.log.jetstream_stream import LogSubjects, model_of
from deltasync.log.log_store import Address
from deltasync.log.records import pack_json

STREAMS = st.sampled_from(["cuts/m", "seals/m"])
SMALL = st.integers(0, 4)
STEPS = st.one_of(
    st.tuples(st.just("append"), STREAMS, SMALL, SMALL, SMALL, st.integers(1, 3)),
    st.tuples(st.just("unfinished"), STREAMS, SMALL, SMALL, SMALL, st.integers(2, 3)),
    st.tuples(st.just("drop"), STREAMS, SMALL, st.one_of(st.none(), SMALL)),
    st.tuples(st.just("truncate"), STREAMS, SMALL),
    st.tuples(st.just("put"), st.dictionaries(st.sampled_from("abc"), st.one_of(st.none(), st.binary()))),
    st.tuples(st.just("fence")),
)


@given(st.lists(STEPS, max_size=40))
def test_it_has_what_was_written_and_not_dropped(steps: list[tuple[Any, ...]]) -> None:
    index, records, small, sequence = Index(), dict[Address, tuple[int, ...]](), dict[str, bytes](), 0
    for kind, *arguments in steps:
        sequence += 10
        if kind in ("append", "unfinished"):
            stream, number, part, at, pieces = arguments
            address, wanted = Address(stream, number, part, at), pieces - (kind == "unfinished")
            for piece in range(wanted):
                index.add_piece(sequence + piece, address, piece, pieces, 7)
            if kind == "append":
                records[address] = tuple(range(sequence, sequence + wanted))
        elif kind == "drop":
            stream, number, part = arguments
            index.add_note(pack_json({"drop": [stream, number, part]}))
            gone = (
                {a for a in records if a.stream == stream and a.number >= number}
                if part is None
                else {a for a in records if a[:3] == (stream, number, part)}
            )
            records = {address: found for address, found in records.items() if address not in gone}
        elif kind == "truncate":
            stream, upto = arguments
            index.add_note(pack_json({"truncate": [stream, upto]}))
            records = {a: found for a, found in records.items() if a.stream != stream or a.number > upto}
        elif kind == "put":
            index.add_note(put_note(arguments[0]))
            small |= arguments[0]
        else:
            index.note_fence()
    found = [pair for stream in index.streams() for pair in index.between(stream, 0, 10)]
    assert found == sorted(records.items())
    for stream in ("cuts/m", "seals/m", "none/m"):
        assert index.newest(stream) == max((each.number for each in records if each.stream == stream), default=0)
    assert index.small == {name: value for name, value in small.items() if value is not None}
    assert index.bytes == 7 * sum(map(len, records.values()))


NAMES = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,20}", fullmatch=True)


@given(NAMES, NAMES)
def test_names_of_models_and_of_streams_are_one_to_one(one: str, other: str) -> None:
    assert model_of("deltasync", LogSubjects("deltasync", one).stream) == one
    assert model_of("delta", LogSubjects("deltasync", one).stream) is None
    assert (LogSubjects("deltasync", one).stream == LogSubjects("deltasync", other).stream) == (one == other)


@given(NAMES, NAMES, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 9))
def test_a_subject_says_which_piece_of_which_record_it_is(
    model: str, owner: str, number: int, part: int, piece: int
) -> None:
    names, address = LogSubjects("deltasync", model), Address(f"releases/{owner}", number, part, piece)
    assert names.parsed(names.piece(address, piece, 10)) == (address, piece, 10)
    assert names.piece(address, piece, 10).count(".") == 8
