"""What a configuration that is read again says of consumers: a pure decision."""

from deltasync.api.reload import outcome
from deltasync.consumers.consumer import ConsumerOptions
from deltasync.core.policy import Policy

TOP = Policy(top_k=3)


def test_it_says_what_has_changed_and_what_has_not() -> None:
    before = {name: ("m", Policy()) for name in ("same", "other", "gone", "wrong", "kept")}
    after = before | {"new": ("m", Policy()), "other": ("m", TOP)}
    wanted = [ConsumerOptions(name, "m", TOP) for name in ("new", "other", "same", "wrong")]
    wanted.append(ConsumerOptions("kept", "m"))
    assert outcome(before, after, wanted, {"wrong": "another model"}) == (
        "made: new; changed: other; as before: same, kept; refused: wrong; not in it, and left as they are: gone; "
        "other settings are read at the next start"
    )
    assert outcome({}, {}, [], {}) == "no consumers; other settings are read at the next start"
