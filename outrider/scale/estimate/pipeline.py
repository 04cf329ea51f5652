"""Pipelines over several devices: idle stages, uneven stages, and draft tokens that fill the stages."""

from math import ceil

from outrider.errors import OutriderError
from outrider.scale.estimate.equations import Model


def pipeline_round(stage_seconds: float, *, stages: int, groups: float, imbalance: float = 1.0) -> float:
    """Return max(p t, m b t), the seconds until all groups of sequences have passed a full pipeline once.

    In decoding, a group enters again as soon as its token is known. A group needs the p stages one
    after another, and the heaviest stage serves all m groups (the bound of a flow shop; Graham
    1966). With m < p, the share (p - m) / p of the stages is idle.

    Args:
        stage_seconds: t, the mean seconds of a stage for one group.
        stages: p.
        groups: m, groups of sequences.
        imbalance: b, the heaviest stage over the mean of all.
    """
    return stage_seconds * max(stages, groups * imbalance)


def heaviest_stage(model: Model, stages: int) -> float:
    """Return the share of a model's active weights in the heaviest of so many stages of whole layers.

    The output layer is on the last stage, which has fewer layers for it. Stages that are bound to devices wait for the
    heaviest one (the weight binding problem of RoundPipe, Luo et al. 2026, arXiv 2604.27085).
    """
    total = model.active()
    layers = int(model.layers)
    layer = (total - model.output) / layers
    if stages == 1:
        return 1.0
    loads = (max(ceil((layers - last) / (stages - 1)) * layer, last * layer + model.output) for last in range(layers))
    return min(loads) / total


def filled_steps(rate: float, *, stages: int, ahead: int) -> float:
    """Return a p / (d + 1) + (1 - a) p, the steps of a stage per token if draft tokens fill the pipeline.

    d draft tokens of a sequence follow its last token through the stages. If the next one is right, the next token is
    there p / (d + 1) steps later. If not, the pipeline starts again, and it takes p. This is the branch prediction of
    processors (Hennessy and Patterson), as SpecPipe (arXiv 2504.04104) and PipeInfer (Butler et al. 2024) apply it.

    Args:
        rate: a, the share of draft tokens that are right, d tokens ahead.
        stages: p.
        ahead: d, from 0 to p - 1. 0: plain decoding, p steps.

    Raises:
        OutriderError: d does not fit into the pipeline.
    """
    if not 0 <= ahead < stages:
        raise OutriderError(
            f"{ahead} draft tokens do not fit into a pipeline of {stages} stages; use --k 0..{stages - 1}"
        )
    return rate * stages / (ahead + 1) + (1 - rate) * stages
