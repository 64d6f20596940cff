"""An S3 server in this process (moto) that can answer like an overloaded one."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_BUSY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>busy</Message></Error>"


class ObjectStore:
    """A server that can reject some requests."""

    def __init__(self, serve: Callable[..., Iterable[bytes]]) -> None:
        self._serve = serve
        self._shut: re.Pattern[str] | None = None
        self.refused = 0

    def shut(self, requests: str) -> None:
        """Answer requests whose method and path match a pattern with 503."""
        self._shut = re.compile(requests)

    def open(self) -> None:
        """Serve all requests again."""
        self._shut = None

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}"
        if self._shut is None or not self._shut.search(request):
            return self._serve(environ, start)
        self.refused += 1
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0) // 2)
        start("503 Slow Down", [("Content-Type", "application/xml"), ("Connection", "close")])
        return [_BUSY]


@contextmanager
def object_store(bucket: str) -> Iterator[ObjectStore]:
    """Run a server with an empty bucket, which s3fs uses by default, in child processes too."""
    import fsspec
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    store = ObjectStore(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, store, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
            patch.setenv("AWS_ACCESS_KEY_ID", "a name")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "a key of these tests alone")
            patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
            patch.setenv("AWS_MAX_ATTEMPTS", "1")  # s3fs retries
            filesystem = fsspec.filesystem("s3")
            filesystem.mkdir(bucket)
            yield store
            filesystem.clear_instance_cache()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
