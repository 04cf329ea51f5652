"""The Python API of transcripts: `transcribe`."""

import secrets
from collections.abc import Iterable, Iterator, Sequence

from outrider.core.params import SamplingParams
from outrider.core.types import SequenceState
from outrider.engine.codec import Source
from outrider.engine.drive import drive
from outrider.engine.requests import as_list
from outrider.llm import LLM
from outrider.models.torch.speech.audio import hear
from outrider.runtime.ranks import of_first_rank
from outrider.serve.speech.options import TranscriptionOptions
from outrider.serve.speech.session import Session, speech_rules
from outrider.serve.speech.transcript import Transcript


def transcribe(
    llm: LLM,
    sources: Source | Sequence[Source],
    params: SamplingParams | None = None,
    *,
    language: str | None = None,
    task: str | None = None,
    prompt: str | None = None,
    timestamps: bool = False,
    condition_on_previous_text: bool = False,
) -> list[Transcript]:
    """Transcribe recordings of any length together.

    A recording that is longer than the encoder takes, 30 seconds for Whisper, is transcribed in
    windows. Each one begins at the last timestamp of the window before it, so its transcript always
    has segments.

    Args:
        llm: the models. The target is a speech model.
        sources: one or several, each the path of a WAV file, a `Recording`, or samples; see
            `LLM.encode_source`.
        params: how to sample each window. None: greedy, until the context is full.
        language: of the audio: a code or an English name, such as "de" or "german". None: the
            default of the checkpoint, or else the model detects it.
        task: "transcribe", or "translate" for English text. None: as the checkpoint says, or
            "transcribe".
        prompt: text before each window, such as names and their spelling. Its last tokens count, as
            many as fit into half of the context.
        timestamps: return segments with their times for short recordings as well.
        condition_on_previous_text: put the text so far before the next window. The text is more
            consistent, but an error may be repeated, so the temperature must be below 0.5.

    Returns:
        One transcript per source, in their order.

    Raises:
        OutriderError: the target is no speech model, or a source or an option does not fit it.
    """
    options = TranscriptionOptions(
        language=language,
        task=task,
        prompt=prompt,
        timestamps=timestamps,
        condition_on_previous_text=condition_on_previous_text,
    )
    many = as_list(sources)
    sessions = [open_session(llm, source, options, params) for source in many]
    for _ in run_sessions(llm, sessions):
        pass
    return [session.transcript() for session in sessions]


def open_session(
    llm: LLM, source: object, options: TranscriptionOptions, params: SamplingParams | None = None
) -> Session:
    """Return the session of one source.

    Raises:
        OutriderError: the target is no speech model, or the source or an option does not fit it.
    """
    audio = hear(source, speech_rules(llm.codec), timestamps=options.timestamps)
    return Session(llm.codec, audio, options, params or SamplingParams(max_tokens=None), context=llm.parts.context)


def run_sessions(llm: LLM, sessions: Iterable[Session]) -> Iterator[Session]:
    """Run sessions together until all are complete. Yield a session after each of its windows.

    Leaving the loop aborts their requests.
    """
    running: dict[int, Session] = {}  # by id of its request
    seqs: list[SequenceState] = []
    try:
        for session in sessions:
            _submit(llm, session, running, seqs)
        for round in drive(llm.engine, seqs):
            for seq in round:
                if seq.finish_reason and (done := running.pop(seq.request.id, None)):
                    done.add(llm.completion(seq))
                    yield done
                    _submit(llm, done, running, seqs)
    finally:
        llm.try_save_plan()


def _submit(llm: LLM, session: Session, running: dict[int, Session], seqs: list[SequenceState]) -> None:
    """Queue the next request of a session, if there is one."""
    step = session.step()
    if step is not None:
        seed = of_first_rank(secrets.randbits(63))
        (request,) = llm.request_maker.make(step.encoded, step.params, seed=seed, speech_output=step.output)
        running[request.id] = session
        seqs.append(llm.add(request))
