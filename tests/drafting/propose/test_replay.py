"""Replay: recorded outputs are drafted with the chosen acceptance, only for their prompt and only while they fit."""

import json

import pytest

from outrider.core.params import SamplingParams
from outrider.drafting.propose.lookup.replay import Recording, ReplayProposer, parse_replay, read_recordings
from outrider.drafting.propose.registry import find_proposer
from outrider.errors import OutriderError
from outrider.testing import ToyTarget, toy_setup
from tests.helpers.engines import make_engine, outputs, run

PROMPT = [1, 2, 0, 2]
GREEDY = SamplingParams(temperature=0.0)


def plain():
    return outputs([replayed([])])[0]


def replayed(recordings, acceptance=1.0):
    engine = make_engine(
        ToyTarget(vocab=5, slots=16), lambda setup: ReplayProposer(setup, recordings, acceptance=acceptance)
    )
    return run(engine, [PROMPT], GREEDY, limit=60, ends=frozenset())[0]


def test_a_perfect_draft_is_accepted_whole():
    row = replayed([Recording(tuple(PROMPT), tuple(plain()))])
    assert outputs([row]) == [plain()]
    assert [accepted for _, accepted, _ in row.rounds] == [drafted for drafted, _, _ in row.rounds]
    assert len(row.rounds) == 60 // 5  # k = 4


def test_a_chosen_acceptance():
    row = replayed([Recording(tuple(PROMPT), tuple(plain()))], acceptance=0.5)
    assert outputs([row]) == [plain()]
    first = [accepted > 0 for drafted, accepted, _ in row.rounds if drafted]
    assert 0.2 < sum(first) / len(first) < 0.8


@pytest.mark.parametrize("prompt", [(1, 2, 0), (2, 2, 0, 2)])
def test_other_prompts_get_no_draft(prompt):
    assert not replayed([Recording(prompt, tuple(plain()))]).num_draft_tokens


def test_a_text_that_differs_gets_no_further_draft():
    text = plain()
    other = [*text[:7], (text[7] + 1) % 5, *text[8:]]
    row = replayed([Recording(tuple(PROMPT), tuple(other))])
    assert outputs([row]) == [text]
    assert row.num_draft_tokens == 8  # two rounds of 4, the second of which has the wrong token


def test_a_second_recording_of_a_prompt_takes_over():
    text = plain()
    other = [*text[:7], (text[7] + 1) % 5, *text[8:]]
    row = replayed([Recording(tuple(PROMPT), tuple(output)) for output in (other, text)])
    assert len(row.rounds) == 60 // 5 + 1


def test_a_file_of_recordings(tmp_path):
    file = tmp_path / "outputs.jsonl"
    file.write_text(json.dumps({"prompt_token_ids": [1, 2], "token_ids": [3]}) + "\n")
    assert read_recordings(file) == [Recording((1, 2), (3,))]
    setup = toy_setup(ToyTarget(vocab=5, slots=2))
    assert isinstance(find_proposer(f"replay:{file}:0.8:3", setup), ReplayProposer)
    assert parse_replay(f"{file}:0.8:3")[1:] == (0.8, 3)


@pytest.mark.parametrize(
    ("line", "argument", "match"),
    [
        (None, "", "names no file"),
        ("{}", "", "no list prompt_token_ids"),
        ('{"prompt_token_ids": [1], "token_ids": [true]}', "", "True, which is not a token id"),
        ('{"prompt_token_ids": [1], "token_ids": [2]}', ":1.5", "from 0 to 1"),
        ('{"prompt_token_ids": [1], "token_ids": [2]}', ":0.5:0.5", "whole number"),
    ],
)
def test_mistakes(tmp_path, line, argument, match):
    file = tmp_path / "outputs.jsonl"
    if line is not None:
        file.write_text(line + "\n")
    with pytest.raises(OutriderError, match=match):
        find_proposer(f"replay:{file}{argument}", toy_setup(ToyTarget(vocab=5, slots=2)))
