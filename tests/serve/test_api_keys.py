"""Tests of named API keys with quotas, and of TLS."""

import asyncio
import json
import ssl

import httpx
import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse

from outrider import OutriderError
from outrider.serve.api_keys import ApiKey, Quota, find_key, read_keys
from outrider.serve.listening import check_tls
from outrider.serve.middleware import ApiKeyMiddleware
from outrider.serve.monitoring.request_log import RequestLog, entry_of
from outrider.serve.settings import Settings
from tests.helpers.certificates import make_certificate

COMPLETIONS = "/v1/completions"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_quota_is_a_bucket_of_one_minute():
    clock = Clock()
    quota = Quota(600, clock)
    assert quota.wait_seconds() == 0
    quota.charge(599)
    assert quota.wait_seconds() == 0  # one token is left
    quota.charge(101)  # 100 below 0; 10 tokens come back each second
    assert quota.wait_seconds() == pytest.approx(10.1)
    clock.now = 10.1
    assert quota.wait_seconds() == 0
    clock.now = 1000.0
    quota.charge(600)  # a long pause fills no more than one minute
    assert quota.wait_seconds() > 0


def test_find_key():
    keys = [ApiKey.of("one", name="first"), ApiKey.of("two", name="second")]
    assert find_key(keys, b"Bearer two").name == "second"
    assert find_key(keys, b"bearer one").name == "first"
    for wrong in (b"", b"Bearer", b"Bearer three", b"Basic one", b"one"):
        assert find_key(keys, wrong) is None


def write(tmp_path, document):
    file = tmp_path / "keys.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(file)


def test_read_keys(tmp_path):
    entries = [{"name": "ci", "key": "secret-1", "tokens_per_minute": 60}, {"name": "team", "key": "secret-2"}]
    ci, team = read_keys(write(tmp_path, entries))
    assert (ci.name, ci.quota.tokens_per_minute, team.quota) == ("ci", 60, None)
    assert find_key([ci, team], b"Bearer secret-2") is team


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("sk-123", "it is not JSON"),
        ([], "no list of keys"),
        ({"name": "a"}, "no list of keys"),
        (["sk-123"], "entry 1"),
        ([{"name": "a"}], "entry 1"),
        ([{"name": "a", "key": "sk-123", "limit": 1}], "only other field"),
        ([{"name": "", "key": "sk-123"}], "empty name or key"),
        ([{"name": "a", "key": 1}], "empty name or key"),
        ([{"name": "a", "key": "sk-123", "tokens_per_minute": 0}], "above 0"),
        ([{"name": "a", "key": "sk-123", "tokens_per_minute": True}], "above 0"),
        ([{"name": "a", "key": "sk-123"}, {"name": "a", "key": "other"}], "same name"),
        ([{"name": "a", "key": "sk-123"}, {"name": "b", "key": "sk-123"}], "same key"),
    ],
)
def test_damaged_key_files(tmp_path, document, message):
    with pytest.raises(OutriderError, match=message) as error:
        read_keys(write(tmp_path, document))
    assert "sk-123" not in str(error.value)


def test_missing_key_file():
    with pytest.raises(OutriderError, match="No such file"):
        read_keys("/no/keys.json")


async def app(scope, receive, send):
    """Answer like a request that used 100 tokens."""
    entry_of(scope).output_tokens = 100
    await JSONResponse({"key": entry_of(scope).key_name})(scope, receive, send)


def calls(keys, *requests):
    """Return the responses to requests: path and key."""

    async def run():
        transport = httpx.ASGITransport(RequestLog(ApiKeyMiddleware(app, keys)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [
                await client.get(path, headers={"authorization": f"Bearer {key}"} if key else {})
                for path, key in requests
            ]

    return asyncio.run(run())


def test_quota_rejects_further_requests_of_one_key():
    clock = Clock()
    limited = ApiKey(name="ci", digest=ApiKey.of("one").digest, quota=Quota(90, clock))
    keys = [limited, ApiKey.of("two", name="team")]
    first, second, other, models = calls(
        keys, (COMPLETIONS, "one"), (COMPLETIONS, "one"), (COMPLETIONS, "two"), ("/v1/models", "one")
    )
    assert first.json() == {"key": "ci"}
    assert second.status_code == 429
    assert second.json()["error"]["type"] == "rate_limit_error"
    assert "'ci' has used its 90 tokens per minute" in second.json()["error"]["message"]
    assert second.headers["retry-after"] == "8"  # 11 tokens at 1.5 per second
    assert (other.status_code, models.status_code) == (200, 200)
    clock.now = 8.0
    assert calls(keys, (COMPLETIONS, "one"))[0].status_code == 200


def test_missing_keys_and_public_paths():
    missing, wrong, health = calls([ApiKey.of("one")], (COMPLETIONS, ""), (COMPLETIONS, "two"), ("/health", ""))
    assert (missing.status_code, wrong.status_code, health.status_code) == (401, 401, 200)


def test_the_name_of_the_key_is_logged(caplog):
    with caplog.at_level("INFO", logger="outrider.serve.requests"):
        calls([ApiKey.of("sk-123", name="ci")], (COMPLETIONS, "sk-123"))
    (record,) = caplog.records
    assert record.fields["key"] == "ci"
    assert "sk-123" not in str(record.fields)


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"))


def test_https(certificate):
    """uvicorn serves HTTPS with these files on sockets that are already bound, as `outrider serve` does."""
    from outrider.serve.listening import bind, listen

    cert, key = certificate
    check_tls(cert, key)

    async def hello(scope, receive, send):
        if scope["type"] == "http":
            await JSONResponse({"scheme": Request(scope).url.scheme})(scope, receive, send)

    async def run():
        sockets = bind("127.0.0.1", 0)
        config = uvicorn.Config(hello, ssl_certfile=cert, ssl_keyfile=key, lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        listen(sockets, "127.0.0.1")
        task = asyncio.create_task(server._serve(sockets))
        url = f"https://localhost:{sockets[0].getsockname()[1]}/"
        context = ssl.create_default_context(cafile=cert)
        try:
            async with httpx.AsyncClient(verify=context) as client:
                while not server.started:
                    await asyncio.sleep(0.01)
                return (await client.get(url)).json()
        finally:
            server.should_exit = True
            await task

    assert asyncio.run(run()) == {"scheme": "https"}


def test_bad_certificates(certificate, tmp_path):
    cert, key = certificate
    damaged = tmp_path / "damaged.pem"
    damaged.write_text("no certificate")
    for files in ((str(damaged), key), (cert, str(damaged)), ("/no/file.pem", key)):
        with pytest.raises(OutriderError, match="cannot be used"):
            check_tls(*files)
    for half in ({"tls_cert": cert}, {"tls_key": key}):
        with pytest.raises(OutriderError, match="give both"):
            Settings(**half)
