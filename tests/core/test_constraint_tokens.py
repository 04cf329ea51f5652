"""Constraints allow exactly the tokens whose bytes they allow, also where an added token has several characters."""

import json
import re
from functools import cache

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.core.constraint import Constraint
from outrider.core.grammar import Grammars, grammar_error
from outrider.core.guidance_tokenizer import GuidanceTokenizer
from outrider.core.params import SamplingParams
from outrider.core.proposer import NoProposer
from outrider.core.token_text import SingleTokens, token_text
from outrider.core.types import Request
from outrider.drafting.propose.draft_model.chain import DraftModelProposer
from outrider.drafting.propose.lookup.ngram import NgramProposer
from outrider.errors import Fault, OutriderError
from outrider.testing import ToyTarget
from tests.helpers.engines import make_engine
from tests.helpers.published_tokenizers import small_tokenizer

TEXTS = ("<think>", "</think>", "x", "<th", "ink>", "é", "{", '"a"', ": ", "1", "}", "ab", "b")
TEXT_TOKENS = ("<think>", "</think>", "a b", "xé ", "é")  # added tokens that are text
SPECIAL_TOKENS = ("<end>", "<stop>", "<sep>")


def byte_level():
    """Every byte, some longer pieces, and added tokens."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<t", "Ġb", "Ã©"]
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return add_tokens(backend)


def sentencepiece():
    """Byte fallback, so that some bytes have two tokens; it puts a space before a text."""
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "x", "é", "▁b", "ab", "<", ">"]
    backend = Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True, unk_token="▁")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return add_tokens(backend)


def add_tokens(backend):
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in TEXT_TOKENS])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


TOKENIZERS = {"byte level": byte_level(), "sentencepiece": sentencepiece()}
UNUSED = 5  # ids of the model beyond those of the tokenizer


PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
# How byte-level tokenizers write each byte.
LETTERS = [chr(byte if byte in PRINTABLE else 256 + OTHERS.index(byte)) for byte in range(256)]


def ids_of(bits):
    return set(np.unpackbits(bits, bitorder="little").nonzero()[0].tolist())


def decoded(tokenizer, id):
    """The bytes that the tokenizer decodes an id to, found without our own table."""
    token = tokenizer.convert_ids_to_tokens(id)
    if token is None or token in SPECIAL_TOKENS:
        return b""
    if byte := re.fullmatch("<0x(..)>", token):
        return bytes([int(byte[1], 16)])
    if tokenizer is TOKENIZERS["byte level"] and len(token) == 1:
        return bytes([LETTERS.index(token)])
    anchor = tokenizer.convert_tokens_to_ids("x")
    return tokenizer.decode([anchor, id])[1:].encode()


@pytest.fixture(scope="module", params=TOKENIZERS)
def setup(request):
    """A tokenizer, its grammars, its end ids and the bytes of each id."""
    tokenizer = TOKENIZERS[request.param]
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<end>", "<stop>")]
    vocab = len(tokenizer) + UNUSED
    grammars = Grammars(tokenizer, vocab=vocab, end_ids=ends)
    return tokenizer, grammars, frozenset(ends), [decoded(tokenizer, id) for id in range(vocab)]


LANGUAGES = {  # a constraint, and all texts that it allows
    "regex": (Constraint.regex("(<think>x|ab)(é|b)?"), ["<think>x", "ab", "<think>xé", "<think>xb", "abé", "abb"]),
    "choice": (Constraint.choice(["<think>a b", "</think>", "<thé"]), ["<think>a b", "</think>", "<thé"]),
    "schema": (
        Constraint.json_schema({"enum": ["<think>", "xé a b", "</think>b"]}),
        ['"<think>"', '"xé a b"', '"</think>b"'],
    ),
    "string": (Constraint.json_schema({"type": "string", "pattern": "^(<think>|ab)$"}), ['"<think>"', '"ab"']),
    "lark": (
        Constraint.grammar('start: "<think>" rest | "a" " b"\nrest: "x" | "</think>" "é"'),
        ["<think>x", "a b", "<think></think>é"],
    ),
    "gbnf": (Constraint.grammar('root ::= [a"] ("<think>" | " b")'), ["a<think>", '"<think>', "a b", '" b']),
}


@pytest.mark.parametrize("name", LANGUAGES)
def test_allowed_tokens_are_those_whose_bytes_fit(setup, name):
    """Walk every tokenization of every text. Where a token is forced, it is one of those that fit."""
    _, grammars, ends, pieces = setup
    constraint, texts = LANGUAGES[name]
    language = [text.encode() for text in texts]
    matcher = grammars.compile(constraint).start(ends)
    reached = set()

    def visit(prefix):
        rest = {text[len(prefix) :] for text in language if text.startswith(prefix)}
        fitting = {id for id, piece in enumerate(pieces) if piece and any(text.startswith(piece) for text in rest)}
        if b"" in rest:
            reached.add(prefix)
            fitting |= ends
        if matcher.done:
            assert rest == {b""}
            return
        allowed = ids_of(matcher.allowed())
        if matcher.forced is None:
            assert allowed == fitting
        else:
            assert allowed == {matcher.forced} <= fitting
        for id in allowed - ends:
            matcher.push(id)
            visit(prefix + pieces[id])
            matcher.pop()

    visit(b"")
    assert reached == set(language)


def test_free_text_allows_every_token_with_a_text(setup):
    _, grammars, ends, pieces = setup
    allowed = ids_of(grammars.compile(Constraint.regex(r"(.|\n)*")).start(ends).allowed())
    text = {id for id, piece in enumerate(pieces) if piece and is_beginning(piece)}
    assert allowed == text | ends


def is_beginning(data):
    """Whether a text can begin with these bytes."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


def test_forced_text_uses_added_tokens(setup):
    tokenizer, grammars, ends, _ = setup
    matcher = grammars.compile(Constraint.choice(["<think>ab</think>"])).start(ends)
    forced = []
    while not matcher.done:
        forced.append(matcher.forced)
        matcher.advance(matcher.forced)
    assert forced[0] == tokenizer.convert_tokens_to_ids("<think>")
    assert forced[-1] == tokenizer.convert_tokens_to_ids("</think>")


def test_text_that_looks_like_a_special_token_is_text(setup):
    tokenizer, grammars, ends, pieces = setup
    matcher = grammars.compile(Constraint.choice(["<sep>x"])).start(ends)
    spelled = b""
    while not matcher.done:
        (token,) = ids_of(matcher.allowed()) if matcher.forced is None else {matcher.forced}
        assert token != tokenizer.convert_tokens_to_ids("<sep>")
        spelled += pieces[token]
        matcher.advance(token)
    assert spelled == b"<sep>x"


def test_grammars_name_tokens(setup):
    """A name is that token and nothing else, whether it is marked special or not, and no text."""
    tokenizer, grammars, ends, _ = setup
    source = 'start: <think> /[^x]*/ </think> <sep> "<think>"  // <think>'
    matcher = grammars.compile(Constraint.grammar(source)).start(ends)
    think, end_think, sep = tokenizer.convert_tokens_to_ids(["<think>", "</think>", "<sep>"])
    assert ids_of(matcher.allowed()) == {think}
    for token in (think, tokenizer.convert_tokens_to_ids("a"), end_think, sep, think):
        assert token in ids_of(matcher.allowed())
        matcher.advance(token)
    assert matcher.done


def test_any_special_token(setup):
    tokenizer, grammars, ends, pieces = setup
    matcher = grammars.compile(Constraint.grammar('start: <[special]> "x"')).start(ends)
    allowed = {id for id in ids_of(matcher.allowed()) if id < len(pieces)}
    assert allowed == {id for id, piece in enumerate(pieces) if piece in (b"", b"\xff")} - ends  # no text has byte FF
    assert tokenizer.convert_tokens_to_ids("<sep>") in allowed


def test_text_that_the_tokenizer_normalizes_is_spelled():
    small = small_tokenizer("Qwen3-0.6B")  # its normalizer composes e and the accent
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=small.reference, eos_token="<|im_end|>")
    source = GuidanceTokenizer(tokenizer, vocab=small.model_vocab, ends=small.end_ids)
    text = "Cafe\u0301<think>"
    assert source.text.spell(source(text)) == text.encode()
    grammars = Grammars(tokenizer, vocab=small.model_vocab, end_ids=small.end_ids)
    matcher = grammars.compile(Constraint.choice([text])).start(frozenset(small.end_ids))
    while not matcher.done:
        assert matcher.forced is not None
        matcher.advance(matcher.forced)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_with_added_tokens(temperature):
    """The text is the same with and without drafts, and forced added tokens are drafted."""
    tokenizer = TOKENIZERS["byte level"]
    vocab = len(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<end>")
    grammars = Grammars(tokenizer, vocab=vocab, end_ids=[end])
    constraint = Constraint.regex("<think>(ab|x|</think>){4}<think>xé </think>")
    params = [SamplingParams(seed=seed, temperature=temperature, constraint=constraint) for seed in range(4)]

    def draft(setup):
        return DraftModelProposer(setup, make_toy(vocab, seed=1))

    outputs = []
    for proposer, k in ((NoProposer, 0), (NoProposer, 4), (NgramProposer, 4), (draft, 4)):
        engine = make_engine(make_toy(vocab, seed=2), proposer, k=k)
        seqs = complete(engine, grammars, end, params)
        texts = [tokenizer.decode(seq.token_ids[2:], skip_special_tokens=True) for seq in seqs]
        assert all(re.fullmatch(constraint.source, text) for text in texts)
        outputs.append([seq.token_ids for seq in seqs])
        assert k == 0 or engine.stats.tau > 1.2
    assert outputs[1:] == outputs[:1] * 3
    assert tokenizer.convert_tokens_to_ids("<think>") in outputs[0][0]


@cache
def random_table(vocab, seed):
    """The logits of a toy. Making them takes longer than the rest of a test."""
    return ToyTarget(vocab=vocab, seed=seed).table


def make_toy(vocab, seed):
    toy = ToyTarget(vocab=2, context=640)
    toy.vocab = vocab
    toy.table = random_table(vocab, seed)
    return toy


def complete(engine, grammars, end, params):
    for i, want in enumerate(params):
        engine.add(
            Request(
                id=i,
                prompt_token_ids=(5, 6),
                params=want,
                seed=i,
                end_ids=frozenset({end}),
                max_tokens=60,
                grammar=grammars.compile(want.constraint),
            )
        )
    done = {}
    while engine.busy():
        done |= {seq.request.id: seq for seq in engine.step() if seq.finish_reason}
    return [done[i] for i in range(len(params))]


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Qwen3-0.6B", "Mistral-7B", "Gemma-3-270m"])
def test_bytes_of_tokens_join_to_the_text(name):
    small = small_tokenizer(name)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=small.reference)
    singles = SingleTokens(tokenizer)
    text = "The answer is 世界 😊, it's<tool_call>\n{}"
    ids = token_text(tokenizer).encode([text])[0]
    assert b"".join(map(singles.piece, ids)).decode() == text
    assert b"".join(token_text(tokenizer).pieces[id] for id in ids).decode() == text


def test_text_of_single_tokens():
    tokenizer = TOKENIZERS["sentencepiece"]
    singles = SingleTokens(tokenizer)
    shown = {token: singles.text(tokenizer.convert_tokens_to_ids(token)) for token in ("▁b", "<0xF0>", "<sep>", "é")}
    assert shown == {"▁b": " b", "<0xF0>": "\\xf0", "<sep>": "<sep>", "é": "é"}
    assert singles.text(len(tokenizer)) == f"token_id:{len(tokenizer)}"
    assert singles.piece(len(tokenizer)) == b""


def test_faults_are_not_blamed_on_the_user(setup):
    _, grammars, ends, _ = setup
    matcher = grammars.compile(Constraint.regex("ab+")).start(ends)
    with pytest.raises(Fault, match="fault of Outrider"):
        matcher.advance(UNUSED)
    assert "simplify" in str(grammar_error("parser error: Too many items"))
    with pytest.raises(OutriderError, match="allows no token"):
        grammars.compile(Constraint.json_schema(json.dumps({"$ref": "#"})))


def test_tokenizers_without_fixed_bytes_are_refused():
    backend = Tokenizer(models.WordPiece(vocab={"a": 0, "##b": 1}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    grammars = Grammars(PreTrainedTokenizerFast(tokenizer_object=backend), vocab=2, end_ids=[0])
    with pytest.raises(OutriderError, match="WordPiece"):
        grammars.compile(Constraint.regex("a"))
