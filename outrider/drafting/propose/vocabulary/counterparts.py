"""Match the tokens of two vocabularies by the text that they spell."""

from typing import Any

from outrider.core.token_text import TokenText, token_text
from outrider.errors import OutriderError

_SAMPLE = "Call at 7:30, naïve friend!\n\tif x > 0:\n        return [1, 'two']  # ok\n"


def faithful_text(tokenizer: Any, whose: str) -> TokenText:
    """Return the text of each token of a transformers tokenizer.

    Args:
        tokenizer: a tokenizer of transformers.
        whose: the model of the tokenizer, for messages.

    Raises:
        OutriderError: the tokens of a text do not spell the text.
    """
    text = token_text(tokenizer)
    (sample_ids,) = text.cut([_SAMPLE])
    if text.spell(sample_ids).removeprefix(b" ") != _SAMPLE.encode():
        raise OutriderError(
            f"the tokenizer of {whose} changes the text that it encodes, so its tokens cannot be matched with those of"
            " another tokenizer; use a draft of the target's family, or --proposer ngram"
        )
    return text


def counterparts(target: TokenText, draft: TokenText) -> list[int]:
    """Return for each id of the target the draft's id with the same text; -1 if there is none.

    No two ids have the same counterpart. Special tokens are matched by how they are written, or else by their role.
    """
    target_special = {content: id for id, content in target.special.items()}
    draft_special = {content: id for id, content in draft.special.items()}
    matches = [-1] * max(len(target.pieces), *(id + 1 for id in target.special), 0)
    for content in target_special.keys() & draft_special.keys():
        matches[target_special[content]] = draft_special[content]
    for role in target.roles.keys() & draft.roles.keys():
        target_id = target.roles[role]
        draft_id = draft.roles[role]
        if matches[target_id] < 0 and draft_id not in matches:
            matches[target_id] = draft_id
    for piece in target.ids.keys() & draft.ids.keys():
        matches[target.ids[piece]] = draft.ids[piece]
    return matches
