"""A small server of OpenAI's API over a tiny model, with a verifier that is right or wrong in a chosen way.

It shares no code with the sampler or the verifiers of the package, so that an audit of it tests both.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tests.helpers import tiny
from tests.helpers.local_server import Handler, serve

NAME = "tiny"


def save_pair(root: Path) -> tuple[Path, Path]:
    """Write a tiny target of low entropy, and a draft that is the target with noise."""
    torch.manual_seed(3)
    config = tiny.make_config("LlamaConfig", num_hidden_layers=2, initializer_range=0.2)
    target = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        # The last token is likely to come again, so that penalties matter.
        target.lm_head.weight.copy_(2.5 * target.lm_head.weight + 3.0 * target.model.embed_tokens.weight)
        target.model.embed_tokens.weight *= 5
    tiny.save_model(root / "target", target)
    with torch.no_grad():
        for weight in target.parameters():
            weight += 0.12 * weight.std() * torch.randn(weight.shape)
    tiny.save_model(root / "draft", target)
    return root / "target", root / "draft"


class FakeEngine:
    """Speculative sampling with a draft model, as in the papers or with one defect."""

    def __init__(self, target: Path, draft: Path, *, k: int = 3) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(target)
        self.k = k
        self.defect = ""
        self._models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (target, draft)]
        self._known: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}
        self._warps: dict[tuple[Any, ...], np.ndarray] = {}

    def generate(self, prompt: list[int], body: dict[str, Any]) -> list[int]:
        """Return the output tokens of a request."""
        rng = np.random.default_rng(body.get("seed"))
        output: list[int] = []
        while len(output) < body["max_tokens"]:
            output += self._round(prompt, output, body, rng) if output else [self._draw(rng, self._p(prompt, [], body))]
        return output[: body["max_tokens"]]

    def _round(self, prompt: list[int], output: list[int], body: dict[str, Any], rng: np.random.Generator) -> list[int]:
        accepted: list[int] = []
        for _ in range(self.k):
            drawn, stated = self._q(prompt, output + accepted, body)
            guess = self._draw(rng, drawn)
            p = self._p(prompt, output + accepted, body, stale=len(accepted))
            if self.defect == "unverified":
                accepted.append(guess)
                continue
            if self.defect == "greedy verifier":
                best = int(p.argmax())
                if guess == best:
                    accepted.append(guess)
                    continue
                return [*accepted, best]
            final = self._p(prompt, output + accepted, body, stale=len(accepted), late=True)
            if rng.random() * stated[guess] < p[guess]:
                accepted.append(guess)
                continue
            rest = (p - stated).clip(min=0)
            if self.defect == "wrong residual":
                rest = p
            if self.defect == "late filters":
                rest = np.where(final > 0, rest, 0)
            return [*accepted, self._draw(rng, rest if rest.sum() > 0 else final)]
        return [*accepted, self._draw(rng, self._p(prompt, output + accepted, body, late=True))]

    def _p(
        self, prompt: list[int], output: list[int], body: dict[str, Any], *, stale: int = 0, late: bool = False
    ) -> np.ndarray:
        """Return the target distribution. With late filters, only the last step of a round has them."""
        counted = output[: len(output) - stale] if self.defect == "stale penalties" else output
        temperature = body["temperature"]
        if self.defect == "greedy":
            temperature = 0.0
        filters = not (self.defect == "late filters" and not late and output)
        return self._warped(0, prompt + output, body, counted, temperature, filters)

    def _q(self, prompt: list[int], output: list[int], body: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return the distribution that the draft samples from, and the one that the verifier is told."""
        filters = self.defect != "late filters"
        stated = self._warped(1, prompt + output, body, output, body["temperature"], filters)
        drawn = stated
        if self.defect == "hot draft":
            drawn = self._warped(1, prompt + output, body, output, 1.0, filters)
        if self.defect == "greedy draft":
            drawn = self._warped(1, prompt + output, body, output, 0.0, filters)
        return drawn, stated

    def _draw(self, rng: np.random.Generator, probs: np.ndarray) -> int:
        edges = probs.cumsum()
        return int(np.searchsorted(edges, rng.random() * edges[-1], side="right").clip(max=len(probs) - 1))

    def _warped(
        self, which: int, text: list[int], body: dict[str, Any], counted: list[int], temperature: float, filters: bool
    ) -> np.ndarray:
        """Return what `warp` returns for the logits after a text. Samples often have the same beginning."""
        settings = (body.get(name) for name in ("presence_penalty", "frequency_penalty", "top_k", "top_p"))
        key = (which, tuple(text), tuple(counted), temperature, filters, *settings)
        if key not in self._warps:
            self._warps[key] = warp(self.logits(which, text), body, counted, temperature, filters)
        return self._warps[key]

    def logits(self, which: int, text: list[int]) -> np.ndarray:
        key = (which, tuple(text))
        if key not in self._known:
            with torch.inference_mode():
                self._known[key] = self._models[which](torch.tensor([text])).logits[0, -1].double().numpy()
        return self._known[key]


def warp(logits: np.ndarray, body: dict[str, Any], counted: list[int], temperature: float, filters: bool) -> np.ndarray:
    """Return the distribution of logits: penalties, temperature, top_k, top_p."""
    counts = np.bincount(counted, minlength=len(logits)) if counted else np.zeros(len(logits))
    logits = logits - body.get("presence_penalty", 0) * (counts > 0) - body.get("frequency_penalty", 0) * counts
    if not temperature:
        return (np.arange(len(logits)) == logits.argmax()).astype(float)
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    if filters:
        order = (-p).argsort(kind="stable")
        keep = np.ones(len(p), dtype=bool)
        if top_k := body.get("top_k", 0):
            keep[order[top_k:]] = False
        ranked = np.where(keep, p, 0)[order] / p[keep].sum()
        keep[order[ranked.cumsum() - ranked >= body.get("top_p", 1.0)]] = False
        p = np.where(keep, p, 0)
        p /= p.sum()
    return p


class FakeServer:
    """Answers requests for completions. It speaks HTTP, or is called directly as the `Server` of the client."""

    def __init__(self, engine: FakeEngine, *, refused: tuple[str, ...] = ()) -> None:
        self.engine = engine
        self.returns_ids_as = "vLLM"  # or "llama.cpp"; "": it returns text only
        self.reads_ids = True  # takes prompts as token ids
        self.refused = refused  # fields that it does not know
        self.url = "http://fake/v1"
        self.metrics_text: str | None = None
        self.bodies: list[dict[str, Any]] = []
        self.retries = 0
        self._lock = Lock()

    def respond(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return the status and the document of a response."""
        self.bodies.append(body)
        if path != "completions":
            return 404, {"error": {"message": f"no {path}"}}
        if unknown := [name for name in self.refused if name in body]:
            return 400, {"error": {"message": f"unknown field {unknown[0]}"}}
        prompt = body["prompt"]
        if not isinstance(prompt, str) and not self.reads_ids:
            prompt = self.engine.tokenizer.decode(prompt) + "!"
        tokens = self.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        with self._lock:
            output = self.engine.generate(tokens, {"temperature": 1.0, "max_tokens": 16} | body)
        choice: dict[str, Any] = {"index": 0, "text": self.engine.tokenizer.decode(output), "finish_reason": "length"}
        if self.returns_ids_as == "vLLM" and body.get("return_token_ids"):
            choice |= {"token_ids": output, "prompt_token_ids": tokens}
        usage = {"prompt_tokens": len(tokens), "completion_tokens": len(output)}
        document: dict[str, Any] = {"choices": [choice], "usage": usage}
        if self.returns_ids_as == "llama.cpp" and body.get("verbose"):
            document["__verbose"] = {"tokens": output if body.get("return_tokens") else []}
        return 200, document

    async def models(self) -> tuple[str, ...]:
        return (NAME,)

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Stand in for the client's connection, without HTTP."""
        from outrider.lab.client.server import Refused

        status, document = self.respond(path, body)
        if status >= 400:
            raise Refused(f"{self.url}/{path}", status, document["error"]["message"])
        return document


@contextmanager
def serving(fake: FakeServer) -> Iterator[str]:
    """Serve over HTTP on the loopback interface. Yields the base URL."""

    class FakeHandler(Handler):
        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self.send(200, json.dumps({"data": [{"id": NAME}]}))
            elif self.path == "/metrics" and fake.metrics_text is not None:
                self.send(200, fake.metrics_text)
            else:
                self.send(404, "{}")

        def do_POST(self) -> None:
            status, document = fake.respond(self.path.removeprefix("/v1/"), self.body())
            self.send(status, json.dumps(document))

    with serve(FakeHandler) as url:
        yield f"{url}/v1"
