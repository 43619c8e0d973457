"""List and watch objects, to keep a local copy of them.

Guarantees:
- `on_change` is called with each new or changed object after a list and at each watch event, and with `deleted` when an
  object is deleted, also if only a new list shows that.
- A broken connection is retried for ever with a pause of at most two seconds.
- After the end of a watch the objects are listed again: the versions of a server that was restored from a backup are
  older, and it sends no event to a watch from a version that it has not reached.
"""

import asyncio
import logging
import random
from collections.abc import Callable

from trainium_contract.api_server.errors import ApiError, ConnectionFailedError, UnavailableError
from trainium_devcluster.node.api.client import Api
from trainium_devcluster.node.api.objects import Json, get_uid
from trainium_devcluster.node.api.waiting import wait_for_event

_log = logging.getLogger(__name__)
_GONE = 410
_FIRST_BACKOFF_SECONDS = 0.05
_MAX_BACKOFF_SECONDS = 2.0
_SYNC_SECONDS = 10.0
_WATCH_SECONDS = (
    300,
    600,
)  # duration of a watch; random, so that watches do not all end at once

OnChange = Callable[[Json, bool], None]


class Reflector:
    """Watches one list of objects; `objects` is keyed by uid, `synced` is set after the first list."""

    def __init__(self, api: Api, path: str, params: dict[str, str], on_change: OnChange) -> None:
        self.objects: dict[str, Json] = {}
        self.synced = asyncio.Event()
        self._api = api
        self._path = path
        self._params = params
        self._on_change = on_change
        self._last_error = ""

    async def run(self) -> None:
        """List and watch until cancelled."""
        pause = _FIRST_BACKOFF_SECONDS
        while True:
            try:
                version = await self._list()
                pause = _FIRST_BACKOFF_SECONDS
                await self._watch(version)
            except ConnectionFailedError as error:
                _log.debug("%s: %s", self._path, error)
            except ApiError as error:
                if error.status != _GONE and str(error) != self._last_error:
                    self._last_error = str(error)
                    _log.warning("%s: %s", self._path, error)
            await asyncio.sleep(pause)
            pause = min(_MAX_BACKOFF_SECONDS, pause * 2)

    async def _list(self) -> str:
        answer = await self._api.get(self._path, self._params)
        # Items of a list have neither kind nor apiVersion; nothing here needs them.
        items = {get_uid(item): item for item in answer.get("items") or []}
        for key in [key for key in self.objects if key not in items]:
            self._on_change(self.objects.pop(key), True)
        for key, item in items.items():
            known = self.objects.get(key)
            self.objects[key] = item
            if known is None or known["metadata"]["resourceVersion"] != item["metadata"]["resourceVersion"]:
                self._on_change(item, False)
        self.synced.set()
        return str(answer["metadata"]["resourceVersion"])

    async def _watch(self, version: str) -> None:
        seconds = random.randint(*_WATCH_SECONDS)  # noqa: S311 - spreads load, guards nothing
        params = {
            **self._params,
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
        }
        async for kind, item in self._api.watch(self._path, params):
            if kind == "DELETED":
                self.objects.pop(get_uid(item), None)
                self._on_change(item, True)
            else:
                self.objects[get_uid(item)] = item
                self._on_change(item, False)


class WatchedObject:
    """One ConfigMap or Secret that pods of this node use. `value` is None while it does not exist."""

    def __init__(self, api: Api, plural: str, namespace: str, name: str) -> None:
        self.value: Json | None = None
        self.listeners: dict[str, Callable[[], None]] = {}
        params = {"fieldSelector": f"metadata.name={name}"}
        self._reflector = Reflector(api, f"/api/v1/namespaces/{namespace}/{plural}", params, self._apply_change)
        self._task = asyncio.create_task(self._reflector.run())

    @property
    def synced(self) -> asyncio.Event:
        """Set once `value` was read from the API server."""
        return self._reflector.synced

    def _apply_change(self, item: Json, deleted: bool) -> None:
        self.value = None if deleted else item
        for listener in list(self.listeners.values()):
            listener()

    def close(self) -> None:
        """Stop watching."""
        self._task.cancel()


class ObjectCache:
    """Watches the ConfigMaps and Secrets that pods use, one by one, as the Node authorizer permits."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._objects: dict[tuple[str, str, str], WatchedObject] = {}

    async def acquire(
        self, plural: str, namespace: str, name: str, consumer: str, listener: Callable[[], None]
    ) -> Json | None:
        """Return the object or None; `listener` is called on its changes until `consumer` releases it.

        Raises:
            UnavailableError: when the API server does not answer within some seconds.
        """
        key = (plural, namespace, name)
        watched = self._objects.get(key)
        if watched is None:
            watched = self._objects[key] = WatchedObject(self._api, *key)
        watched.listeners[consumer] = listener
        if not await wait_for_event(watched.synced, _SYNC_SECONDS):
            raise UnavailableError(f"{plural} {namespace}/{name} could not be read from the API server")
        return watched.value

    def release(self, consumer: str) -> None:
        """Remove a consumer; an object without consumers is no longer watched."""
        for key, watched in list(self._objects.items()):
            watched.listeners.pop(consumer, None)
            if not watched.listeners:
                watched.close()
                del self._objects[key]
