"""The datastore against brute force, its making and its flaws, and the proposer that looks things up in it."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.core.types import Batch, Scores
from outrider.errors import OutriderError
from outrider.loader.checkpoint import load_checkpoint
from outrider.loader.embedded import embedded
from outrider.propose.lookup.datastore import LONGEST, SORTED, Datastore, join, sort_suffixes, vocabulary
from outrider.propose.lookup.retrieval import RetrievalProposer
from outrider.propose.registry import find_proposer
from outrider.testing import ToyTarget, toy_setup
from outrider.testing.drive import make_round, make_row
from outrider.tools import index

CODE = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n"

texts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=5)


def occurrences(documents, ending):
    """Where an ending occurs, as (document, place behind it)."""
    size = len(ending)
    return [
        (d, at + size)
        for d, document in enumerate(documents)
        for at in range(len(document) - size + 1)
        if list(document[at : at + size]) == list(ending)
    ]


@settings(max_examples=60, deadline=None)
@given(documents=texts, vocab=st.sampled_from([4, 70_000]))
def test_suffixes_are_in_order(documents, vocab):
    tokens = join([np.array(document) for document in documents], vocab)
    assert tokens.dtype == (">u2" if vocab == 4 else ">u4")
    suffixes = sort_suffixes(tokens, len(documents)).tolist()
    separator = int(tokens[-1])
    flat = tokens.tolist()
    begins = [i for i, token in enumerate(flat) if token != separator]
    assert sorted(suffixes) == begins

    def heard(at):  # up to its document's end; what is behind it does not matter
        return flat[at : flat.index(separator, at) + 1][:SORTED]

    said = [heard(at) for at in suffixes]
    assert said == sorted(said)


def test_equal_suffixes_stand_as_they_come():
    tokens = join([np.zeros(500, np.int64)], 4)
    suffixes = sort_suffixes(tokens, 1).tolist()
    alike = [at for at in suffixes if at + SORTED <= 500]
    assert suffixes[: len(alike)] == sorted(alike)
    assert len(alike) == 500 - SORTED + 1


def test_sorting_says_how_far_it_is():
    told = []
    sort_suffixes(join([np.arange(100) % 7], 7), 1, told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0


@settings(max_examples=80, deadline=None)
@given(documents=texts, text=st.lists(st.integers(0, 3), max_size=30), shortest=st.integers(1, 4))
def test_find_is_brute_force(documents, text, shortest):
    store = Datastore.of(documents, 4)
    sizes = [size for size in range(shortest, min(len(text), LONGEST) + 1) if occurrences(documents, text[-size:])]
    match = store.find(text, shortest=shortest)
    if not sizes:
        assert match is None
        return
    assert match.size == max(sizes)
    expected = occurrences(documents, text[-match.size :])
    assert len(match.span) == len(expected)
    columns = store.following(match, samples=10**6, depth=5)
    found = sorted(cut(row, store.separator) for row in zip(*columns, strict=True))
    assert found == sorted(tuple(documents[d][at : at + 5]) for d, at in expected)


def test_unused_ids_are_counted(tokenizer):
    """Or a token might be as large as the separator."""
    assert vocabulary(tokenizer) == len(tokenizer)

    class Sparse:
        def get_vocab(self):
            return {"a": 0, "b": 70_000}

    assert vocabulary(Sparse()) == 70_001
    assert join([np.array([70_000])], 70_001).tolist() == [70_000, 2**32 - 1]


def cut(row, separator):
    return row[: row.index(separator)] if separator in row else row


def test_find_in_texts_that_repeat_themselves():
    chance = random.Random(3)
    phrase = [chance.randrange(50) for _ in range(30)]
    documents = [phrase * 3, [chance.randrange(50) for _ in range(300)] + phrase, phrase[:20]]
    store = Datastore.of(documents, 50)
    for end in range(1, 30):
        match = store.find(phrase[:end])
        assert match.size == min(end, LONGEST)
        assert len(match.span) == len(occurrences(documents, phrase[:end][-LONGEST:]))


def test_samples_are_spread_evenly():
    documents = [[1, 2, 3]] * 30 + [[1, 2, 4]] * 10
    store = Datastore.of(documents, 5)
    (column,) = store.following(store.find([1, 2]), samples=8, depth=1)
    assert column == [3] * 6 + [4] * 2


def test_a_text_with_ids_beyond_the_datastore():
    store = Datastore.of([[1, 2, 3, 4]], 5)
    assert store.find([1, 2, 70_000]) is None
    assert store.find([70_000, 2, 3]).size == 2
    assert store.find([]) is None


def guesses(documents, text, *, budget=8, vocab=10, **settings):
    proposer = RetrievalProposer(
        replace(toy_setup(ToyTarget()), vocab=vocab), Datastore.of(documents, vocab), **settings
    )
    row = make_row(list(text), 0)
    batch = Batch(seqs=(row,), start=(0,), feed=(tuple(text),), draft_budget=(budget,))
    return proposer, batch, proposer.propose(batch)


def paths(draft):
    """Each node's tokens from the root down, and its chance."""
    found = []
    for token, parent, chance in zip(
        draft.tokens[0].tolist(), draft.parent[0].tolist(), draft.accept_prob[0], strict=True
    ):
        found.append((*(found[parent][0] if parent >= 0 else ()), token))
        found[-1] = (found[-1], chance)
    return found


def test_the_commonest_continuations_are_guessed():
    documents = [[1, 2, 3, 4, 5]] * 6 + [[1, 2, 3, 6]] * 3 + [[1, 2, 7]]
    _, _, draft = guesses(documents, [0, 1, 2], budget=4)
    assert [path for path, _ in paths(draft)] == [(3,), (3, 4), (3, 4, 5), (3, 6)]
    assert not draft.chain
    assert draft.depth == (3,)


def test_a_guess_ends_with_its_document():
    _, _, draft = guesses([[1, 2, 3], [4, 5, 6, 7]], [1, 2])
    assert [path for path, _ in paths(draft)] == [(3,)]
    _, _, none = guesses([[1, 2], [3, 4]], [1, 2])
    assert none.size == 0


def test_the_longest_ending_decides():
    documents = [[9, 1, 2, 3]] + [[8, 1, 2, 4]] * 50
    _, _, draft = guesses(documents, [9, 1, 2])
    assert [path for path, _ in paths(draft)] == [(3,)]


def test_short_endings_are_left_alone():
    assert guesses([[1, 2, 3]], [0, 2])[2].size == 0
    assert guesses([[1, 2, 3]], [0, 2], shortest=1)[2].size == 1
    assert guesses([[1, 2, 3]], [1, 2], shortest=3)[2].size == 0


def test_ids_that_the_target_lacks_are_never_guessed():
    documents = [[1, 2, 9, 3]] * 5 + [[1, 2, 4]]
    _, _, draft = guesses(documents, [1, 2], vocab=10)
    assert 9 in draft.tokens
    proposer = RetrievalProposer(replace(toy_setup(ToyTarget()), vocab=9), Datastore.of(documents, 10))
    row = make_row([1, 2], 0)
    draft = proposer.propose(Batch(seqs=(row,), start=(0,), feed=((1, 2),), draft_budget=(8,)))
    assert draft.tokens.tolist() == [[4]]


def test_it_learns_what_its_guesses_are_worth():
    proposer, batch, draft = guesses([[1, 2, 3, 4]] * 4, [1, 2], budget=2)
    before = draft.accept_prob[0][0]
    for _ in range(20):
        proposer.propose(batch)
        proposer.commit(make_round(batch, draft, Scores(logits=draft.tokens[..., None].float()), [()], [(7,)]))
    assert proposer.propose(batch).accept_prob[0][0] < before / 3


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "code.py").write_text(CODE)
    lines = [{"text": "The sea was calm."}, {"prompt": "The sea was rough.", "other": "The moon"}]
    lines.append({"messages": [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]})
    (folder / "lines.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    return folder


def build(files, out, *, target=None, field=None, force=False):
    names = [str(file) for file in files]
    return index.run_index(names, target=target, out=str(out), field=field, force=force, console=Console(quiet=True))


@pytest.fixture(scope="module")
def tokenizer():
    return load_checkpoint(embedded("nano"), dtype="float32", device="cpu").tokenizer


@pytest.fixture
def setup(tokenizer):
    return replace(toy_setup(ToyTarget()), vocab=len(tokenizer), tokenizer=tokenizer)


def test_what_is_in_a_datastore(corpus, tmp_path, tokenizer):
    summary = build([corpus / "code.py", corpus / "lines.jsonl"], tmp_path / "store")
    store = Datastore.open(tmp_path / "store")
    last = json.loads((corpus / "lines.jsonl").read_text().split("\n")[4])
    messages = tokenizer.apply_chat_template(last["messages"], tokenize=False)
    expected = [CODE, "The sea was calm.", "The sea was rough.", messages]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in expected]
    assert documents(store) == ids
    header = store.header
    assert (header.documents, header.tokens) == (4, sum(map(len, ids)) + 4)
    assert [(file.name, file.documents) for file in header.files] == [
        (str(corpus / "code.py"), 1),
        (str(corpus / "lines.jsonl"), 3),
    ]
    assert sum(file.tokens for file in header.files) == summary["tokens"] == sum(map(len, ids))
    assert summary["bytes"] == sum(file.stat().st_size for file in (tmp_path / "store").iterdir())


def documents(store):
    found, tokens = [[]], store._tokens.tolist()
    for token in tokens:
        if token == store.separator:
            found.append([])
        else:
            found[-1].append(token)
    return found[:-1]


def test_a_field_by_its_name(corpus, tmp_path, tokenizer):
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": "no", "other": "The moon"}))
    build([tmp_path / "other.jsonl"], tmp_path / "store", field="other")
    assert documents(Datastore.open(tmp_path / "store")) == [tokenizer.encode("The moon", add_special_tokens=False)]


def test_a_long_text_is_read_in_pieces(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setattr(index, "_PIECE", 40)
    (tmp_path / "long.txt").write_text(CODE + "x" * 100)
    (tmp_path / "short.txt").write_text("The sea")
    build([tmp_path / "long.txt", tmp_path / "short.txt"], tmp_path / "store")
    long, short = documents(Datastore.open(tmp_path / "store"))
    assert tokenizer.decode(long) == CODE + "x" * 100
    assert tokenizer.decode(short) == "The sea"


def test_a_mark_of_the_encoding_is_no_text(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "The sea"}), encoding="utf-8-sig")
    (tmp_path / "b.txt").write_text("The sea", encoding="utf-8-sig")
    build([tmp_path / "a.jsonl", tmp_path / "b.txt"], tmp_path / "store")
    assert [tokenizer.decode(each) for each in documents(Datastore.open(tmp_path / "store"))] == ["The sea", "The sea"]


def test_an_empty_file_is_left_out_and_told(corpus, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    summary = build([corpus / "code.py", tmp_path / "empty.txt"], tmp_path / "store")
    assert (summary["files"], summary["empty"], summary["documents"]) == (2, 1, 1)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", b"", "the files are empty"),
        ("a.jsonl", b"\n\n", "the files are empty"),
        ("a.txt", b"\xff\xfe", "a.txt is not UTF-8 text"),
        ("a.txt", b"a\0b", "a.txt is not text"),
        ("a.jsonl", b'{"text": "x"}\n{', "a.jsonl:2: not JSON"),
        ("a.jsonl", b'{"body": "x"}', "a.jsonl:1: no text or prompt or messages .* --field"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', "a.jsonl:1: no text"),
        ("a.jsonl", b"[1]", "a.jsonl:1: no text"),
        ("a.jsonl", b'{"text": "a\\ud800"}', "a.jsonl:1: half a character"),
    ],
)
def test_files_that_cannot_be_indexed(name, content, reason, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(OutriderError, match=reason):
        build([tmp_path / name], tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_arguments_that_cannot_be_honoured(corpus, tmp_path):
    code = corpus / "code.py"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    for files, out, rest, reason in [
        ([tmp_path / "none.txt"], "store", {}, "none.txt is not there"),
        ([corpus], "store", {}, "is a folder; name its files"),
        ([code], "store", {"field": "text"}, "--field text is for JSON lines"),
        ([code], "store", {"target": "nowhere"}, "nowhere is not a folder"),
        ([code], "store", {"target": str(tmp_path)}, "holds no tokenizer"),
        ([code], "mine", {"force": True}, "mine exists and is no datastore"),
        ([code], "mine/letter.txt", {}, "is a file; name a folder"),
        ([code], "mine/letter.txt/store", {}, "is to be in .*letter.txt, which is a file"),
    ]:
        with pytest.raises(OutriderError, match=reason):
            build(files, tmp_path / out, **rest)
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["letter.txt"]


def test_a_datastore_is_replaced_on_demand_only(corpus, tmp_path):
    place = tmp_path / "store"
    build([corpus / "code.py"], place)
    before = Datastore.open(place)
    with pytest.raises(OutriderError, match=r"store exists; .* --force"):
        build([corpus / "lines.jsonl"], place)
    assert Datastore.open(place).header == before.header
    build([corpus / "lines.jsonl"], place, force=True)
    assert Datastore.open(place).header.documents == 3
    assert before.find(documents(before)[0][:5]).size == 5  # who has the old one open goes on with it
    assert [file.name for file in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("moment", ["sort_suffixes", "_save"])
def test_an_interrupted_build_leaves_nothing(moment, force, corpus, tmp_path, monkeypatch):
    place = tmp_path / "store"
    if force:
        build([corpus / "code.py"], place)
    before = sorted(tmp_path.rglob("*"))

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(index, moment, interrupt)
    with pytest.raises(KeyboardInterrupt):
        build([corpus / "lines.jsonl"], place, force=force)
    assert sorted(tmp_path.rglob("*")) == before
    if force:
        assert Datastore.open(place).header.documents == 1


def test_interrupted_while_it_takes_its_place(corpus, tmp_path, monkeypatch):
    place = tmp_path / "store"
    build([corpus / "code.py"], place)
    rename, seen = type(place).rename, []

    def interrupted(self, target):
        if self.name == "new" and not seen:
            seen.append(self)
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(type(place), "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build([corpus / "lines.jsonl"], place, force=True)
    assert seen
    assert Datastore.open(place).header.documents == 1
    assert [file.name for file in tmp_path.iterdir()] == ["store"]


def damage(place, how):
    header = json.loads((place / "header.json").read_text())
    match how:
        case "version":
            header["version"] = 99
        case "format":
            header["format"] = "cookbook"
        case "width":
            header["width"] = 3
        case "field":
            del header["width"]
        case "tokenizer":
            header["tokenizer"] = "0" * 64
        case "short":
            (place / "tokens.bin").write_bytes((place / "tokens.bin").read_bytes()[:-2])
        case "missing":
            (place / "suffixes.bin").unlink()
    (place / "header.json").write_text("{" if how == "json" else json.dumps(header))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("version", "is a datastore of version 99, .* build it again"),
        ("format", "header.json is damaged .* build the datastore again"),
        ("field", "header.json is damaged"),
        ("width", "header.json is damaged .its numbers do not fit together"),
        ("json", "header.json is damaged"),
        ("short", r"tokens.bin is damaged \(it has \d+ bytes, and its header says \d+\)"),
        ("missing", "suffixes.bin is damaged"),
        ("tokenizer", "was made with another tokenizer than the target's .12288 and 12288 ids.; build it again"),
    ],
)
def test_datastores_that_cannot_be_used(how, reason, corpus, tmp_path, setup):
    build([corpus / "code.py"], tmp_path / "store")
    damage(tmp_path / "store", how)
    with pytest.raises(OutriderError, match=reason):
        find_proposer(f"retrieval:{tmp_path / 'store'}", setup)


def test_nonsense_in_a_datastore_does_no_harm(corpus, tmp_path, setup):
    """A wrong suffix array leads to wrong guesses at worst."""
    build([corpus / "code.py"], tmp_path / "store")
    chance = random.Random(0)
    size = (tmp_path / "store" / "suffixes.bin").stat().st_size
    (tmp_path / "store" / "suffixes.bin").write_bytes(chance.randbytes(size))
    proposer = find_proposer(f"retrieval:{tmp_path / 'store'}:1", setup)
    for end in range(1, 20):
        text = setup.tokenizer.encode(CODE)[:end]
        batch = Batch(seqs=(make_row(text, 0),), start=(0,), feed=(tuple(text),), draft_budget=(8,))
        assert all(token < setup.vocab for token in proposer.propose(batch).tokens[0].tolist())


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("retrieval", "write retrieval:DIR"),
        ("retrieval:nowhere", "nowhere holds no datastore; make one with outrider index"),
        ("retrieval:{place}:0", "use 1 to 16"),
        ("retrieval:{place}:17", "use 1 to 16"),
        ("retrieval:{place}:" + "9" * 5000, "use 1 to 16"),
    ],
)
def test_how_it_is_named(spec, reason, corpus, tmp_path, setup):
    build([corpus / "code.py"], tmp_path / "store")
    with pytest.raises(OutriderError, match=reason):
        find_proposer(spec.format(place=tmp_path / "store"), setup)


def test_the_verb_and_then_a_run(corpus, tmp_path):
    """What the target says is in the datastore, so it comes out in fewer passes, and is the same."""
    prompt = "<|endoftext|>def add(a, b):\n"
    words = ["--max-tokens", "24", "--dtype", "float32", "--threads", "1", "--json", prompt]
    plain = invoke("run", "--proposer", "none", *words)
    said = json.loads(plain.stdout)["completions"][0]
    (tmp_path / "said.txt").write_text(prompt.removeprefix("<|endoftext|>") + said["text"])
    place = str(tmp_path / "store")
    made = invoke("index", str(tmp_path / "said.txt"), str(corpus / "lines.jsonl"), "--out", place, "--json")
    assert json.loads(made.stdout)["documents"] == 4
    assert "use it with --proposer retrieval:" in made.stderr
    guessed = json.loads(invoke("run", "--proposer", f"retrieval:{place}", "--k", "6", *words).stdout)
    assert guessed["completions"][0]["tokens"] == said["tokens"]
    assert guessed["stats"]["tau"] > 3


def invoke(*words):
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result


def test_mistakes_at_the_command_line(corpus, tmp_path):
    result = CliRunner().invoke(app, ["index", str(tmp_path / "none.txt"), "--out", str(tmp_path / "store")])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "is not there" in result.stderr
    missing = CliRunner().invoke(app, ["run", "--proposer", f"retrieval:{tmp_path / 'store'}", "x"])
    assert missing.exit_code == 2
    assert "holds no datastore" in missing.stderr
