"""The datastore, compared with brute force: building, damaged files, and the proposer that uses it."""

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
from outrider.core.config import EngineConfig
from outrider.core.types import Batch, DraftBudget, Scores
from outrider.drafting.propose.lookup.datastore import LONGEST, SORTED, Datastore, join, sort_suffixes, vocabulary
from outrider.drafting.propose.lookup.retrieval import RetrievalProposer
from outrider.drafting.propose.registry import find_proposer
from outrider.errors import OutriderError
from outrider.models.loader.embedded import embedded
from outrider.models.loader.load import load_checkpoint
from outrider.testing import ToyTarget, toy_setup
from outrider.testing.drive import make_round, make_seq
from outrider.tools import index
from outrider.tools.settings import IndexSettings

CODE = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n"

texts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=5)


def occurrences(documents, tokens):
    """Return the occurrences of a token sequence as pairs of the document and the position after it."""
    size = len(tokens)
    return [
        (d, start + size)
        for d, document in enumerate(documents)
        for start in range(len(document) - size + 1)
        if list(document[start : start + size]) == list(tokens)
    ]


@settings(max_examples=60, deadline=None)
@given(documents=texts, vocab=st.sampled_from([4, 70_000]))
def test_suffixes_are_sorted(documents, vocab):
    tokens = join([np.array(document) for document in documents], vocab)
    assert tokens.dtype == (">u2" if vocab == 4 else ">u4")
    positions = sort_suffixes(tokens, len(documents)).tolist()
    separator = int(tokens[-1])
    flat = tokens.tolist()
    assert sorted(positions) == [i for i, token in enumerate(flat) if token != separator]

    def sort_key(position):  # tokens after the end of the document do not matter
        return flat[position : flat.index(separator, position) + 1][:SORTED]

    keys = [sort_key(position) for position in positions]
    assert keys == sorted(keys)


def test_equal_suffixes_are_sorted_by_position():
    tokens = join([np.zeros(500, np.int64)], 4)
    positions = sort_suffixes(tokens, 1).tolist()
    equal = [position for position in positions if position + SORTED <= 500]
    assert positions[: len(equal)] == sorted(equal)
    assert len(equal) == 500 - SORTED + 1


def test_sorting_reports_its_progress():
    shares = []
    sort_suffixes(join([np.arange(100) % 7], 7), 1, shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@settings(max_examples=80, deadline=None)
@given(documents=texts, text=st.lists(st.integers(0, 3), max_size=30), shortest=st.integers(1, 4))
def test_find_equals_brute_force(documents, text, shortest):
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
    following = sorted(cut(tokens, store.separator) for tokens in zip(*columns, strict=True))
    assert following == sorted(tuple(documents[d][end : end + 5]) for d, end in expected)


def test_vocabulary_counts_unused_ids(tokenizer):
    """Otherwise a token could be as large as the separator."""
    assert vocabulary(tokenizer) == len(tokenizer)

    class SparseTokenizer:
        def get_vocab(self):
            return {"a": 0, "b": 70_000}

    assert vocabulary(SparseTokenizer()) == 70_001
    assert join([np.array([70_000])], 70_001).tolist() == [70_000, 2**32 - 1]


def cut(tokens, separator):
    """Return the tokens before the separator."""
    return tokens[: tokens.index(separator)] if separator in tokens else tokens


def test_find_in_repetitive_documents():
    rng = random.Random(3)
    phrase = [rng.randrange(50) for _ in range(30)]
    documents = [phrase * 3, [rng.randrange(50) for _ in range(300)] + phrase, phrase[:20]]
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


def test_find_with_ids_beyond_the_vocabulary():
    store = Datastore.of([[1, 2, 3, 4]], 5)
    assert store.find([1, 2, 70_000]) is None
    assert store.find([70_000, 2, 3]).size == 2
    assert store.find([]) is None


def propose(documents, text, *, budget=8, vocab=10, **settings):
    """Return a proposer, a batch of one sequence, and the draft for it."""
    setup = replace(toy_setup(ToyTarget()), vocab=vocab)
    proposer = RetrievalProposer(setup, Datastore.of(documents, vocab), **settings)
    seq = make_seq(list(text), 0)
    batch = Batch(seqs=(seq,), start=(0,), feed=(tuple(text),), budget=DraftBudget((budget,)))
    return proposer, batch, proposer.propose(batch)


def paths(draft):
    """Return the path from the root to each node."""
    paths = []
    for token, parent in zip(draft.tokens[0].tolist(), draft.parent[0].tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def test_most_frequent_continuations_are_drafted():
    documents = [[1, 2, 3, 4, 5]] * 6 + [[1, 2, 3, 6]] * 3 + [[1, 2, 7]]
    _, _, draft = propose(documents, [0, 1, 2], budget=4)
    assert paths(draft) == [(3,), (3, 4), (3, 4, 5), (3, 6)]
    assert not draft.chain
    assert draft.depth == (3,)


def test_draft_ends_at_the_end_of_the_document():
    _, _, draft = propose([[1, 2, 3], [4, 5, 6, 7]], [1, 2])
    assert paths(draft) == [(3,)]
    _, _, none = propose([[1, 2], [3, 4]], [1, 2])
    assert none.size == 0


def test_longest_suffix_is_used():
    documents = [[9, 1, 2, 3]] + [[8, 1, 2, 4]] * 50
    _, _, draft = propose(documents, [9, 1, 2])
    assert paths(draft) == [(3,)]


def test_suffixes_below_the_minimum_are_not_looked_up():
    assert propose([[1, 2, 3]], [0, 2])[2].size == 0
    assert propose([[1, 2, 3]], [0, 2], shortest=1)[2].size == 1
    assert propose([[1, 2, 3]], [1, 2], shortest=3)[2].size == 0


def test_ids_beyond_the_targets_vocabulary_are_not_drafted():
    documents = [[1, 2, 9, 3]] * 5 + [[1, 2, 4]]
    _, _, draft = propose(documents, [1, 2], vocab=10)
    assert 9 in draft.tokens
    proposer = RetrievalProposer(replace(toy_setup(ToyTarget()), vocab=9), Datastore.of(documents, 10))
    seq = make_seq([1, 2], 0)
    draft = proposer.propose(Batch(seqs=(seq,), start=(0,), feed=((1, 2),), budget=DraftBudget((8,))))
    assert draft.tokens.tolist() == [[4]]


def test_acceptance_is_learned_from_rounds():
    proposer, batch, draft = propose([[1, 2, 3, 4]] * 4, [1, 2], budget=2)
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
    """Build a datastore and return the summary."""
    names = [str(file) for file in files]
    engine = EngineConfig(target=target)
    settings = IndexSettings(files=names, engine=engine, out=str(out), field=field, force=force)
    return index.run_index(settings, console=Console(quiet=True))


@pytest.fixture(scope="module")
def tokenizer():
    return load_checkpoint(embedded("nano"), dtype="float32", device="cpu").tokenizer


@pytest.fixture
def setup(tokenizer):
    return replace(toy_setup(ToyTarget()), vocab=len(tokenizer), tokenizer=tokenizer)


def test_datastore_has_the_tokens_and_sizes_of_its_files(corpus, tmp_path, tokenizer):
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
    """Return the tokens of each document."""
    documents = [[]]
    for token in store.tokens.tolist():
        if token == store.separator:
            documents.append([])
        else:
            documents[-1].append(token)
    return documents[:-1]


def test_field_option(corpus, tmp_path, tokenizer):
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": "no", "other": "The moon"}))
    build([tmp_path / "other.jsonl"], tmp_path / "store", field="other")
    assert documents(Datastore.open(tmp_path / "store")) == [tokenizer.encode("The moon", add_special_tokens=False)]


def test_long_file_is_tokenized_in_chunks(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setattr(index, "PIECE", 40)
    (tmp_path / "long.txt").write_text(CODE + "x" * 100)
    (tmp_path / "short.txt").write_text("The sea")
    build([tmp_path / "long.txt", tmp_path / "short.txt"], tmp_path / "store")
    long, short = documents(Datastore.open(tmp_path / "store"))
    assert tokenizer.decode(long) == CODE + "x" * 100
    assert tokenizer.decode(short) == "The sea"


def test_byte_order_mark_is_removed(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "The sea"}), encoding="utf-8-sig")
    (tmp_path / "b.txt").write_text("The sea", encoding="utf-8-sig")
    build([tmp_path / "a.jsonl", tmp_path / "b.txt"], tmp_path / "store")
    assert [tokenizer.decode(each) for each in documents(Datastore.open(tmp_path / "store"))] == ["The sea", "The sea"]


def test_empty_file_is_counted_and_left_out(corpus, tmp_path):
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
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', "a.jsonl:1: message 1 has no content"),
        ("a.jsonl", b"[1]", "a.jsonl:1: no text"),
        ("a.jsonl", b'{"text": "a\\ud800"}', "a.jsonl:1: the text has half of a surrogate pair"),
    ],
)
def test_invalid_files_are_rejected(name, content, reason, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(OutriderError, match=reason):
        build([tmp_path / name], tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_invalid_arguments_are_rejected(corpus, tmp_path):
    code = corpus / "code.py"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    for files, out, rest, reason in [
        ([tmp_path / "none.txt"], "store", {}, "none.txt does not exist"),
        ([corpus], "store", {}, "is a folder; name its files"),
        ([code], "store", {"field": "text"}, "--field text applies to files .*jsonl"),
        ([code], "store", {"target": "nowhere"}, "nowhere is not a folder"),
        ([code], "store", {"target": str(tmp_path)}, "has no working tokenizer"),
        ([code], "mine", {"force": True}, "mine exists and is not a datastore"),
        ([code], "mine/letter.txt", {}, "is a file; name a folder"),
        ([code], "mine/letter.txt/store", {}, "is inside .*letter.txt, which is a file"),
    ]:
        with pytest.raises(OutriderError, match=reason):
            build(files, tmp_path / out, **rest)
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["letter.txt"]


def test_datastore_is_replaced_only_with_force(corpus, tmp_path):
    place = tmp_path / "store"
    build([corpus / "code.py"], place)
    before = Datastore.open(place)
    with pytest.raises(OutriderError, match=r"store exists; .* --force"):
        build([corpus / "lines.jsonl"], place)
    assert Datastore.open(place).header == before.header
    build([corpus / "lines.jsonl"], place, force=True)
    assert Datastore.open(place).header.documents == 3
    assert before.find(documents(before)[0][:5]).size == 5  # the old one can still be used where it is open
    assert [file.name for file in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("moment", ["sort_suffixes", "_save"])
def test_interrupted_build_leaves_no_files(moment, force, corpus, tmp_path, monkeypatch):
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


def test_interrupted_replacement_keeps_the_old_datastore(corpus, tmp_path, monkeypatch):
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
        ("width", "header.json is damaged .its width or its numbers of documents and tokens are not possible"),
        ("json", "header.json is damaged"),
        ("short", r"tokens.bin is damaged \(it has \d+ bytes, but its header says \d+\)"),
        ("missing", "suffixes.bin is damaged"),
        ("tokenizer", "was made with another tokenizer than the target's .12288 and 12288 ids.; build it again"),
    ],
)
def test_unusable_datastores_are_rejected(how, reason, corpus, tmp_path, setup):
    build([corpus / "code.py"], tmp_path / "store")
    damage(tmp_path / "store", how)
    with pytest.raises(OutriderError, match=reason):
        find_proposer(f"retrieval:{tmp_path / 'store'}", setup)


def test_random_suffix_array_does_no_harm(corpus, tmp_path, setup):
    """A wrong suffix array only causes a bad draft."""
    build([corpus / "code.py"], tmp_path / "store")
    rng = random.Random(0)
    size = (tmp_path / "store" / "suffixes.bin").stat().st_size
    (tmp_path / "store" / "suffixes.bin").write_bytes(rng.randbytes(size))
    proposer = find_proposer(f"retrieval:{tmp_path / 'store'}:1", setup)
    for end in range(1, 20):
        text = setup.tokenizer.encode(CODE)[:end]
        batch = Batch(seqs=(make_seq(text, 0),), start=(0,), feed=(tuple(text),), budget=DraftBudget((8,)))
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
def test_invalid_retrieval_arguments_are_rejected(spec, reason, corpus, tmp_path, setup):
    build([corpus / "code.py"], tmp_path / "store")
    with pytest.raises(OutriderError, match=reason):
        find_proposer(spec.format(place=tmp_path / "store"), setup)


def test_index_command_and_run_command(corpus, tmp_path):
    """The datastore has the target's output, so the same output takes fewer passes."""
    prompt = "<|endoftext|>def add(a, b):\n"
    arguments = ["--max-tokens", "24", "--dtype", "float32", "--threads", "1", "--json", prompt]
    plain = invoke("run", "--proposer", "none", *arguments)
    completion = json.loads(plain.stdout)["completions"][0]
    (tmp_path / "output.txt").write_text(prompt.removeprefix("<|endoftext|>") + completion["text"])
    place = str(tmp_path / "store")
    built = invoke("index", str(tmp_path / "output.txt"), str(corpus / "lines.jsonl"), "--out", place, "--json")
    assert json.loads(built.stdout)["documents"] == 4
    assert "use it with --proposer retrieval:" in built.stderr
    result = json.loads(invoke("run", "--proposer", f"retrieval:{place}", "--k", "6", *arguments).stdout)
    assert result["completions"][0]["token_ids"] == completion["token_ids"]
    assert result["stats"]["tau"] > 3


def invoke(*arguments):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result


def test_errors_on_the_command_line(corpus, tmp_path):
    result = CliRunner().invoke(app, ["index", str(tmp_path / "none.txt"), "--out", str(tmp_path / "store")])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "does not exist" in result.stderr
    missing = CliRunner().invoke(app, ["run", "--proposer", f"retrieval:{tmp_path / 'store'}", "x"])
    assert missing.exit_code == 2
    assert "holds no datastore" in missing.stderr
