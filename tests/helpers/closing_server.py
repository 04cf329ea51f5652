"""A server that closes a kept connection when the next request arrives on it, as servers do with idle connections."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

from tests.helpers.local_server import Handler, serve

STREAM = b'data: {"choices": [{"text": "a", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'


@contextmanager
def closing_server(*, per_connection: int = 1, cut: bool = False) -> Iterator[tuple[str, list[str]]]:
    """Serve completions over HTTP on the loopback interface.

    Args:
        per_connection: requests of a connection that are answered; the next one is read, and the connection closed.
        cut: send the headers of the request that is not answered, and half of its body.

    Yields:
        The base URL with /v1, and the paths of the requests that were answered.
    """
    answered: list[str] = []

    class ClosingHandler(Handler):  # one for each connection
        num_answered = 0

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._answer(json.dumps({"data": [{"id": "m"}]}).encode())
            else:
                self._answer(b"{}", status=404)

        def do_POST(self) -> None:
            body = self.body()
            choice = {"text": "a", "finish_reason": "length"}
            document = {"choices": [choice], "usage": {"completion_tokens": 1}}
            self._answer(STREAM if body.get("stream") else json.dumps(document).encode())

        def _answer(self, content: bytes, *, status: int = 200) -> None:
            closes = self.num_answered == per_connection
            self.close_connection = closes
            if closes and not cut:
                return
            self.num_answered += 1
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if closes else content)
            if not closes:
                answered.append(self.path)

    with serve(ClosingHandler) as url:
        yield f"{url}/v1", answered
