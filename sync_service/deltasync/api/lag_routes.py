"""How far consumers are behind, over HTTP."""

from fastapi import APIRouter

from deltasync.service.service import Service
from deltasync.status.answers import Answers
from deltasync.status.history import LagHistories, LagHistory
from deltasync.status.lag import ConsumerLag
from deltasync.status.overview import ConsumerOverview, consumer_overviews


def lag_routes(service: Service, answers: Answers, histories: LagHistories) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/lag")
    async def lags() -> list[ConsumerOverview]:
        """How far the consumers of this process are behind, each in one line."""
        service.check_confirmed()
        return consumer_overviews(service, await answers.lags())

    @routes.get("/consumers/{name}/lag")
    async def lag(name: str) -> ConsumerLag:
        """How far a consumer is behind its model: in versions, rows, bytes, seconds and unsent norm.

        Per replica and per table, with one word for the state and the reason for it.
        """
        return await answers.lag(name)

    @routes.get("/consumers/{name}/history")
    async def history(name: str) -> LagHistory:
        """How far a consumer has been behind over the last minutes."""
        return histories.of(service.consumer(name).name)

    return routes
