"""How many examples Hypothesis tries: few in every run, twenty times as many every night.

`--hypothesis-profile nightly` chooses the nightly profile. By day, examples are the same in each run, so that a
failure belongs to the change at hand. By night they are random, and Hypothesis prints how to repeat a failure.
"""

from hypothesis import settings

# A deadline would measure time, and this says nothing on a busy machine.
settings.register_profile("default", max_examples=10, deadline=None, derandomize=True)
settings.register_profile("nightly", max_examples=200, deadline=None, print_blob=True)


def examples() -> int:
    """How many examples a test tries with the profile in use."""
    profile = settings.default
    assert profile
    return profile.max_examples


def stateful(stateful_step_count: int = 50) -> settings:
    """Settings of a state machine, which gets two and a half times the examples of other tests."""
    return settings(max_examples=examples() * 5 // 2, stateful_step_count=stateful_step_count)
