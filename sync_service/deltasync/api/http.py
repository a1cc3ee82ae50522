"""The HTTP side, for operators and their tools."""

from fastapi import FastAPI

from deltasync.api.access import Access
from deltasync.api.access_routes import AccessMiddleware
from deltasync.api.checkpoint_routes import checkpoint_routes
from deltasync.api.consumer_routes import consumer_routes
from deltasync.api.delete_routes import delete_routes
from deltasync.api.documentation import documentation_routes
from deltasync.api.event_routes import event_routes
from deltasync.api.http_errors import answer_errors
from deltasync.api.lag_routes import lag_routes
from deltasync.api.lenient import LenientMiddleware
from deltasync.api.log_routes import log_routes
from deltasync.api.model_routes import model_routes
from deltasync.api.operation_routes import operation_routes
from deltasync.api.origins import OriginsMiddleware
from deltasync.api.overview_routes import overview_routes
from deltasync.api.page import page_routes
from deltasync.api.process_routes import process_routes
from deltasync.api.route_inputs import EncodedPathMiddleware, take_inputs
from deltasync.api.table_routes import table_routes
from deltasync.api.trainer_routes import trainer_routes
from deltasync.core.build import built_version
from deltasync.service.service import Service
from deltasync.status.answers import Answers
from deltasync.status.sampler import Sampler

_DESCRIPTION = """
How far every consumer is behind, why, and what to do about it.

Answers are JSON, with the names that `deltasync ... --json` has. Times are seconds unless the name says otherwise.
Every error is `{"error": NAME, "message": WORDS}`. Of several processes each answers for its own models: a request
about the model of another one is answered 307 with its address, lists are of the process that is asked, and
`/processes` names all. With roles, `GET` needs `read`, and what changes something
`admin`; `/livez` and `/readyz` need nothing.
"""


def create_app(service: Service, access: Access, sampler: Sampler | None = None) -> FastAPI:
    """The application; it shares the service's event loop. `sampler` looks for those who watch, once it runs."""
    app = FastAPI(
        title="deltasync",
        version=built_version() or "unknown",
        description=_DESCRIPTION,
        openapi_url=None,
        docs_url=None,  # It would be fetched from elsewhere.
        redoc_url=None,
        redirect_slashes=False,  # Which would send who asks, and their token, to the host that they have named.
    )
    app.add_middleware(AccessMiddleware, access=access)
    app.add_middleware(LenientMiddleware)
    app.add_middleware(EncodedPathMiddleware)
    # Last, so it sees a request first: browsers ask without a token whether they may send one.
    app.add_middleware(OriginsMiddleware, service=service)
    answer_errors(app)
    sampler = sampler or Sampler(service, Answers(service))
    answers = sampler.answers
    routers = (
        overview_routes(service, access, answers, sampler),
        consumer_routes(service),
        lag_routes(service, answers, sampler.histories),
        table_routes(service, answers),
        model_routes(service),
        trainer_routes(service),
        event_routes(service),
        delete_routes(service),
        process_routes(service),
        checkpoint_routes(service),
        log_routes(service),
        operation_routes(service),
    )
    # Included, each route would be made twice.
    app.router.routes += [route for router in routers for route in router.routes]
    app.router.routes += page_routes(service)
    app.router.routes += documentation_routes(app)
    take_inputs(app.router.routes)
    return app
