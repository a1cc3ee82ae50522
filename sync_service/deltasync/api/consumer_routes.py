"""Consumers over HTTP: their status, and what changes them."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from deltasync.access.roles import Role, author, check_may
from deltasync.api.operation_routes import Collaborators
from deltasync.api.requests import (
    ConsumerBody,
    EncodedRoute,
    FollowBody,
    NewConsumerBody,
    ObjectionBody,
    PauseBody,
    PolicyBody,
)
from deltasync.base.errors import InvalidInput
from deltasync.consumers.consumer import ConsumerOptions
from deltasync.consumers.follow import HistoryPage, RolloutDelay
from deltasync.status.answers import LagHistory, Sampler
from deltasync.status.records import ConsumerStatus

_Since = Annotated[float, Query(ge=0, le=1e9, description="Only lines of the last seconds.")]
_Last = Annotated[int, Query(ge=1, le=100_000, description="Maximum number of lines; the newest ones count.")]
_From = Annotated[
    int | None,
    Query(ge=0, lt=2**63, description="The next page, instead of `since_seconds`: `next_ns` of this one."),
]
_MADE: dict[int | str, dict[str, Any]] = {
    201: {"model": ConsumerStatus, "description": "The consumer was created."}
}


def consumer_routes(on: Collaborators, sampler: Sampler) -> APIRouter:
    """Routes for consumers, their policies, pauses and replicas, and for what they follow and served."""
    models, registry, consumers, following = on.models, on.registry, on.consumers, on.following
    routes, answers = APIRouter(prefix="/consumers", route_class=EncodedRoute), sampler.answers

    @routes.get("")
    async def all_consumers() -> list[ConsumerStatus]:
        """The consumers of this process, each with the replicas that need attention."""
        models.check_confirmed()
        return await answers.listed()

    @routes.get("/{name}")
    @routes.get("/{name}/lag")  # What operators ask for.
    async def consumer(name: str) -> ConsumerStatus:
        """A consumer: its state and the reason for it, and its lag, also of each replica and each table."""
        return await answers.consumer(name)

    @routes.get("/{name}/lag/history")
    async def lag_history(name: str) -> LagHistory:
        """The lag of a consumer over the last minutes."""
        return sampler.histories.of(consumers.get(name).name)

    @routes.post("", responses=_MADE)
    async def create(body: NewConsumerBody, response: Response) -> ConsumerStatus:
        """Create a consumer. Answers 409 if it exists with another model or policy. Needs role admin."""
        options = ConsumerOptions.described(body.name, body.model, body.policy.as_dict())
        response.status_code = 200 if options.name in registry.consumers else 201
        await consumers.create(options.name, options.model, body.policy, author())
        return await answers.changed(options.name)

    @routes.put("/{name}", responses=_MADE)
    async def put(name: str, body: ConsumerBody, response: Response) -> ConsumerStatus:
        """Create a consumer, or give an existing one this policy. Needs role admin."""
        options = ConsumerOptions.described(name, body.model, body.policy.as_dict())
        response.status_code = 200 if name in registry.consumers else 201
        await consumers.ensure(options, author())
        return await answers.changed(name)

    @routes.put("/{name}/policy")
    async def update(name: str, policy: PolicyBody) -> ConsumerStatus:
        """Replace the whole policy of a consumer. Its replicas keep their offsets. Needs role admin."""
        await consumers.update(name, policy, author())
        return await answers.changed(name)

    @routes.delete("/{name}", status_code=204)
    async def delete(name: str) -> None:
        """Delete a consumer and its offsets. Needs role admin."""
        await consumers.delete(name, author())

    @routes.put("/{name}/pause")
    async def pause(name: str, body: PauseBody | None = None) -> ConsumerStatus:
        """Pause a consumer: its replicas get no new rows. Needs role admin."""
        await on.pauses.pause(name, body.reason if body else "", author())
        return await answers.changed(name)

    @routes.delete("/{name}/pause")
    async def resume(name: str) -> ConsumerStatus:
        """Resume a paused consumer. Its replicas get the current rows. Needs role admin."""
        await on.pauses.resume(name, author())
        return await answers.changed(name)

    @routes.put("/{name}/version")
    async def follow(name: str, body: FollowBody) -> ConsumerStatus:
        """Let a consumer follow a kept version, "live", or another consumer at a distance. Needs role admin."""
        if body.after is not None:
            distance = RolloutDelay(body.after, body.behind_seconds, body.on_objection)
            await following.follow_consumer(name, distance, body.version, author())
        elif body.version:
            await following.follow(name, body.version, author())
        else:
            raise InvalidInput("body: name a version, or a consumer after which to follow")
        return await answers.changed(name)

    @routes.post("/{name}/object")
    async def raise_objection(name: str, body: ObjectionBody) -> ConsumerStatus:
        """Raise an objection to what a consumer serves. Needs role subscribe for this consumer."""
        check_may(Role.SUBSCRIBE, name)
        await following.object(name, body.reason, author())
        return await answers.changed(name)

    @routes.delete("/{name}/object")
    async def withdraw_objection(name: str) -> ConsumerStatus:
        """Withdraw the objection of a consumer. Needs role admin."""
        await following.withdraw(name, author())
        return await answers.changed(name)

    @routes.get("/{name}/history")
    async def history(
        name: str, since_seconds: _Since = 3600.0, last: _Last = 1000, from_ns: _From = None
    ) -> HistoryPage:
        """The history of a consumer, in pages: which version each replica served, by time, oldest first."""
        return await on.histories.of(name, since_seconds, last, from_ns)

    @routes.delete("/{name}/replicas/{replica}", status_code=204)
    async def forget_replica(name: str, replica: str) -> None:
        """Forget a replica that is away; the lag no longer includes it. Needs role admin."""
        await on.removals.forget_replica(name, replica, author())

    return routes
