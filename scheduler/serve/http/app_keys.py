"""What every HTTP handler finds in its application: the settings, and the service once the model is loaded."""

from dataclasses import dataclass

from aiohttp import web

from scheduler.serve.service import Service
from scheduler.serve.settings import ServeSettings
from scheduler.serve.wire.errors import unavailable


@dataclass(slots=True)
class Serving:
    """The door of the house: open from the start, `service` is None while the model is loading."""

    service: Service | None = None

    def get(self) -> Service:
        """The service. Raises `ApiError` 503 while there is none."""
        if self.service is None:
            raise unavailable("the model is loading")
        return self.service


SERVING = web.AppKey("serving", Serving)
SETTINGS = web.AppKey("settings", ServeSettings)
