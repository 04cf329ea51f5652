"""A worker for llama.cpp: its `llama-server`, over a Unix socket."""

import atexit
import http.client
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import worker
from llama_server import LlamaServer, ServerError, greedy_request
from worker import LLAMACPP_TYPES, NGRAM_SIZE, PEER_MODES, Arguments, Mode, PeerError, Run

_PROGRAM = "llama-server"


class LlamaCpp:
    """A server process. It measures the times itself, so the completion is not streamed."""

    packages: Sequence[str] = ()

    def __init__(self, args: Arguments) -> None:
        args.require(PEER_MODES, LLAMACPP_TYPES)
        program = shutil.which(_PROGRAM)
        if program is None:
            raise PeerError(f"{_PROGRAM} is not on the PATH; install it (see README.md)")
        options = _options(args)
        self._server = LlamaServer(program, options)
        atexit.register(self._server.close)
        self.settings: Mapping[str, Any] = {
            "version": _version(program),
            "options": " ".join(_without_folders(options)),
        }
        self._ignore_eos = args.ignore_eos
        try:
            self._server.wait_until_ready()
        except ServerError as error:
            raise PeerError(str(error)) from error

    def complete(self, prompt: Sequence[int], max_tokens: int) -> Run:
        request = greedy_request(prompt, max_tokens)
        request["ignore_eos"] = self._ignore_eos  # the server then never chooses an end-of-text token
        status, answer = self._server.request("POST", "/completion", request)
        if status != http.client.OK:
            raise PeerError(f"{_PROGRAM} answered {status}: {answer.get('error', {}).get('message', '')}")
        timings = answer["timings"]
        if timings["prompt_n"] != len(prompt):
            raise PeerError(f"{_PROGRAM} processed {timings['prompt_n']} tokens of a prompt of {len(prompt)}")
        return Run(
            prompt=prompt,
            tokens=answer["tokens"],
            first_chunk_tokens=1,
            seconds=timings["predicted_ms"] / 1e3,
            ttft=timings["prompt_ms"] / 1e3,
        )


def _options(args: Arguments) -> list[str]:
    threads = str(args.threads)
    options = ["--model", str(args.converted_model(args.target, ".gguf")), "--ctx-size", str(args.context())]
    options += ["--threads", threads, "--threads-batch", threads, "--flash-attn", "on"]
    options += ["--cache-ram", "0"]
    if args.mode is Mode.DRAFT:
        draft = str(args.converted_model(args.draft_folder(), ".gguf"))
        options += ["--spec-type", "draft-simple", "--spec-draft-model", draft, "--spec-draft-threads", threads]
        options += ["--spec-draft-n-max", str(args.draft_length())]
    elif args.mode is Mode.NGRAM:
        options += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(NGRAM_SIZE)]
        k = str(args.draft_length())
        options += ["--spec-ngram-simple-size-m", k, "--spec-draft-n-max", k]
    return options


def _without_folders(options: Sequence[str]) -> list[str]:
    """Return the options for the report: model files without their folders."""
    return [Path(option).name if option.endswith(".gguf") else option for option in options]


def _version(program: str) -> str:
    completed = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    lines = (completed.stdout + completed.stderr).splitlines()
    return next((line.removeprefix("version: ") for line in lines if line.startswith("version")), "unknown")


if __name__ == "__main__":
    worker.main(LlamaCpp)
