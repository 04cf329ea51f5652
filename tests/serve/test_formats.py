"""Subtitles and documents of a transcript."""

from outrider.serve.speech.formats import to_document, to_srt, to_verbose_document, to_vtt
from outrider.serve.speech.transcript import Segment, Transcript


def segment(start, end, text):
    return Segment(start=start, end=end, text=text, token_ids=(7, 8), window_start=29.5)


TRANSCRIPT = Transcript(
    text=" Mia reads. So --> on.",
    segments=(segment(0.0, 1.5, " Mia\nreads."), segment(1.5, 2.0, " "), segment(59.999, 3661.02, " So --> on.")),
    language="de",
    language_detected=True,
    task="transcribe",
    seconds=3700.25,
    temperature=0.5,
    completions=(),
)


def test_srt():
    assert to_srt(TRANSCRIPT) == (
        "1\n00:00:00,000 --> 00:00:01,500\nMia reads.\n\n2\n00:00:59,999 --> 01:01:01,020\nSo -> on.\n"
    )


def test_vtt():
    assert to_vtt(TRANSCRIPT) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nMia reads.\n\n00:00:59.999 --> 01:01:01.020\nSo -> on.\n"
    )


def test_documents():
    assert to_document(TRANSCRIPT) == {"text": "Mia reads. So --> on.", "language": "german"}
    document = to_verbose_document(TRANSCRIPT)
    segments = document.pop("segments")
    assert document == {
        "task": "transcribe",
        "language": "german",
        "duration": 3700.25,
        "text": "Mia reads. So --> on.",
    }
    assert segments[2] == {
        "id": 2,
        "seek": 2950,
        "start": 59.999,
        "end": 3661.02,
        "text": " So --> on.",
        "tokens": [7, 8],
        "temperature": 0.5,
    }
