"""Sum the metrics of replicas."""

from collections.abc import Mapping, Sequence

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

# Gauges whose sum over replicas is the value of the whole server. Other gauges keep a label with the replica.
_SUMMED_GAUGES = frozenset(
    {
        "outrider_num_requests_running",
        "outrider_num_requests_waiting",
        "outrider_max_num_seqs",
        "outrider_kv_cache_blocks",
        "outrider_degraded",
    }
)


def sum_metrics(expositions: Mapping[str, str]) -> bytes:
    """Return the metrics of all replicas in the Prometheus text format.

    Args:
        expositions: the text of each replica, by its name.

    Returns:
        Counters, histograms and counts are summed. Other gauges, such as ratios, have a label `replica`.
    """
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for replica, text in expositions.items():
        for family in text_string_to_metric_families(text):
            families.setdefault(family.name, family)
            kept = values.setdefault(family.name, {})
            own = {"replica": replica} if family.type == "gauge" and family.name not in _SUMMED_GAUGES else {}
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                key = (sample.name, tuple(sorted({**sample.labels, **own}.items())))
                kept[key] = kept.get(key, 0.0) + sample.value
    return generate_latest(_Registry([_with(families[name], values[name]) for name in families]))


def _with(family: Metric, values: Mapping[tuple[str, tuple[tuple[str, str], ...]], float]) -> Metric:
    """Return a family with other samples."""
    metric = Metric(family.name, family.documentation, family.type)
    metric.samples = [Sample(name, dict(labels), value) for (name, labels), value in values.items()]
    return metric


class _Registry:
    """The metrics that `generate_latest` reads."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Sequence[Metric]:
        return self._metrics
