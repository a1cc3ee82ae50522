"""2,000 tables and ten policies at the limits that a process has by default."""

import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.support.fleet import Recorder, Trainer, admin_of, follow, wait_for_lag
from tests.support.process import ServiceProcess

from deltasync.client import CallbackTarget, Mode, Policy, TableSpec, ValueType

# Most distributions give a shell and a service so many open files, unless they are told otherwise.
DESCRIPTORS = 1024
TABLES = [TableSpec(f"model.sparse.embedding_{number}", 16, 4) for number in range(2000)]
POLICIES = [
    Policy(top_k=0.5, value_type=value_type) for value_type in ValueType if not value_type.name.endswith("TBE")
]
POLICIES += [
    Policy(mode=Mode.IDS),
    Policy(mode=Mode.IDS, top_k=5),
    *(Policy(top_k=number) for number in range(1, 11)),
]
LONG = 100.0


@contextmanager
def descriptors(limit: int) -> Iterator[None]:
    """Processes that are started meanwhile may have so many open files."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def nowhere() -> CallbackTarget:
    return CallbackTarget(lambda _: None)


def held(service: ServiceProcess) -> tuple[int, int]:
    """Open files and mappings of a service."""
    folder = Path(f"/proc/{service.pid}")
    return len(list((folder / "fd").iterdir())), len((folder / "maps").read_text().splitlines())


@pytest.mark.nightly
def test_many_tables_with_many_policies_start_run_and_come_back(tmp_path: Path) -> None:
    service = ServiceProcess(tmp_path, "--consumer", "plain=clicks")
    policies = {f"consumer-{number}": policy for number, policy in enumerate(POLICIES[:10])}
    with descriptors(DESCRIPTORS), service:
        with Trainer(service.grpc, TABLES) as trainer, follow(service, "plain", "a", Recorder()) as plain:
            head = trainer.publish_all()
            plain.wait_for(head, LONG)
            for name, policy in policies.items():
                admin_of(service).create_consumer(name, "clicks", policy)
            with ExitStack() as stack:
                replicas = [stack.enter_context(follow(service, name, "a", nowhere())) for name in policies]
                for each in replicas:
                    each.wait_for(1, LONG)
            head = trainer.change(1, TABLES[:10])
            plain.wait_for(head, LONG)
            files, mappings = held(service)
            assert files < 200
            assert mappings < 2000
        assert service.terminate() == 0
        service.start()
        target = Recorder()
        with follow(service, "plain", "b", target) as plain:
            plain.wait_for(head, LONG)
            assert target.bytes() == trainer.expected()
        for name in policies:
            wait_for_lag(service, name, lambda lag: lag["head"] == head.number)
        files, mappings = held(service)
        assert files < 200
        assert mappings < 2000
