"""The positions that the columns of a block attend to, in configs.

`layer_types` says which layers have a window. Whether a column sees later columns is read from the first of these that
a config has: `is_causal` of z-lab, `causal` of vLLM, `causal_head` of JetSpec. Without one, layers with a window are
causal, and others are not; speculators has a switch for layers with a window.
"""

from typing import NamedTuple

from outrider.errors import OutriderError
from outrider.models.heads.config import ConfigReader
from outrider.models.heads.description import BlockView, DraftBlock
from outrider.models.heads.formats.base import Config, refuse
from outrider.models.heads.formats.block_parts import At

_FULL, _SLIDING = "full_attention", "sliding_attention"
_CAUSAL = ("is_causal", "causal", "causal_head")  # the first one that a config has counts
_NON_CAUSAL = "sliding_window_non_causal"  # of speculators


def read_views(at: At, layer: ConfigReader, count: int, nested_causal: bool | None) -> tuple[BlockView, ...]:
    """Return what the columns of a block attend to, by layer; () if it is everything.

    Args:
        at: finds the values of a config.
        count: the number of layers.
        nested_causal: whether layers with a window are causal if a config of speculators does not
            say; None: the config is flat.

    Raises:
        OutriderError: the config contradicts itself, or its attention is not supported.
    """
    types = _layer_types(at, layer, count)
    window = at("swa_window_size").integer("swa_window_size", layer.integer("sliding_window", 0))
    if _SLIDING in types and window < 1:
        raise OutriderError("config.json has layers with a sliding window, but not its size; add sliding_window")
    switch = next((name for name in _CAUSAL if name in at(name)), None)
    of_windows = nested_causal is None or not at(_NON_CAUSAL).boolean(_NON_CAUSAL, not nested_causal)
    views = tuple(
        BlockView(
            window=window if kind == _SLIDING else 0,
            causal=at(switch).boolean(switch) if switch else kind == _SLIDING and of_windows,
        )
        for kind in types
    )
    return () if set(views) == {BlockView()} else views


def _layer_types(at: At, layer: ConfigReader, count: int) -> tuple[str, ...]:
    """Return the kind of attention of each layer."""
    types = layer.strings("layer_types")
    has_window = layer.boolean("use_sliding_window", False) or layer.string("model_type", "") == "mistral"
    if not types and has_window and "sliding_window" in layer:
        raise OutriderError("config.json has a sliding window, but not the layers that use it; add layer_types")
    types = types or (_FULL,) * count
    if at("use_swa").boolean("use_swa", False) and _SLIDING not in types:  # as in vLLM
        types = (_SLIDING,) * len(types)
    unknown = sorted(set(types) - {_FULL, _SLIDING})
    if unknown or len(types) != count:
        raise OutriderError(
            f"layer_types has {len(types)} entries for {count} layers"
            + (f", and {unknown[0]!r} is not supported" if unknown else "")
            + f"; use one of {_FULL} and {_SLIDING} for each layer"
        )
    return types


class WrittenViews(NamedTuple):
    """The values of a config that describe views."""

    layers: Config  # in the config of the layers
    block: Config  # in that of the block


def written_views(name: str, block: DraftBlock, *, nested: bool) -> WrittenViews:
    """Return the values of a config that describe what columns attend to.

    Raises:
        OutriderError: format `name` cannot describe it.
    """
    views = block.views
    windows = {view.window for view in views if view.window}
    refuse(name, {"has windows of several sizes": len(windows) > 1})
    layers: Config = {}
    if windows:
        types = [_SLIDING if view.window else _FULL for view in views]
        layers = {"layer_types": types, "sliding_window": max(windows), "use_sliding_window": True}
    causal = {view.causal for view in views}
    if nested:
        causal_windows = {view.causal for view in views if view.window}
        causal_others = any(view.causal for view in views if not view.window)
        refuse(name, {"has a causal block without a window; use --to dflash": causal_others})
        refuse(name, {"has causal blocks in only some of its layers with a window": len(causal_windows) > 1})
        # Otherwise vLLM makes the attention of all layers causal, not only of those with a window.
        return WrittenViews(layers, {_NON_CAUSAL: True not in causal_windows})
    if len(causal) == 1:
        is_causal = causal.pop()
        return WrittenViews({**layers, "is_causal": is_causal}, {"causal": is_causal, "causal_head": is_causal})
    by_window = all(view.causal == bool(view.window) for view in views)
    refuse(name, {"has causal blocks in layers that windows do not tell apart": not by_window})
    return WrittenViews(layers, {})
