"""The source of a request as text for lookups, which search it besides the sequence itself."""

from outrider.core.types import Request


def source_text(request: Request) -> tuple[int, ...]:
    """Return the source of a request to an encoder-decoder target, which outputs often copy from.

    The first token of the decoder comes before it, so that the beginning of the source is found in
    the first round. The result is () for a request without a source.
    """
    if not request.source_token_ids:
        return ()
    return request.prompt_token_ids[:1] + request.source_token_ids
