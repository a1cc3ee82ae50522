"""What a process says of consumers and models that it cannot answer for yet, and of models that nobody has."""

from collections.abc import Collection
from dataclasses import replace

from tests.unit.support.async_tests import in_service

from deltasync.core.owner import Owner
from deltasync.ownership.alone import Alone
from deltasync.ownership.member import Member
from deltasync.service.service import Service
from deltasync.status.overview import consumer_overviews, model_overviews, unowned_models


class Owning(Alone):
    """Process `a` is about to take `coming`, `b` owns `elsewhere`, and nobody has `lost`."""

    def owner_of(self, model: str) -> Owner | None:
        owner = self.me.owner()
        return {"coming": owner, "elsewhere": replace(owner, process="b")}.get(model)

    def models(self) -> Collection[str]:
        return ("coming", "elsewhere", "lost")

    def consumers_of(self, model: str) -> Collection[str]:
        return (f"{model}-1", f"{model}-2")


@in_service()
async def test_consumers_of_a_model_that_this_process_is_taking_are_listed_and_wait(service: Service) -> None:
    service.owners = Owning(Member("a", "", ""))
    lines = consumer_overviews(service, [])
    assert [(each.consumer, each.model, each.state, each.head) for each in lines] == [
        ("coming-1", "coming", "waiting", None),
        ("coming-2", "coming", "waiting", None),
    ]
    assert {each.reason for each in lines} == {
        "nobody answers for model 'coming': this process is about to take it over"
    }


@in_service()
async def test_a_model_that_nobody_has_is_named_by_every_process(service: Service) -> None:
    service.owners = Owning(Member("a", "", ""))
    assert unowned_models(service) == ["lost"]
    (line,) = model_overviews(service)
    assert (line.model, line.head) == ("lost", None)
    assert line.trouble == "no process that is known to be alive has this model"
