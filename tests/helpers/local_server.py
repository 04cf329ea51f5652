"""An HTTP server on the loopback interface, in a thread of the tests."""

import json
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class Handler(BaseHTTPRequestHandler):
    """Reads JSON, sends text, and logs nothing."""

    protocol_version = "HTTP/1.1"

    def body(self):
        """Return the JSON document of the request."""
        return json.loads(self.rfile.read(int(self.headers["content-length"])))

    def send(self, status, content):
        """Send text or bytes. The client may have canceled the request."""
        data = content.encode() if isinstance(content, str) else content
        with suppress(ConnectionError):
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *_):
        """Log nothing."""


@contextmanager
def serve(handler):
    """Run a server until the block ends. Yield its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
