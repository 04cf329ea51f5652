"""Tests of deploy/kubernetes: schemas of Kubernetes, and agreement with the server and the image."""

import re
from pathlib import Path

import pytest

from outrider.core.option import as_json
from outrider.serve.settings import Settings

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
CUSTOM = {"Kustomization", "ServiceMonitor"}  # kinds that Kubernetes itself does not define


def manifests():
    """Return the manifests by kind, without the values of the metrics adapter."""
    documents = []
    for file in sorted(FOLDER.glob("*.yaml")):
        if file.name != "adapter-rules.yaml":
            documents += [each for each in yaml.safe_load_all(file.read_text()) if each]
    return {each["kind"]: each for each in documents}


MANIFESTS = manifests()
POD = MANIFESTS["Deployment"]["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]


@pytest.mark.parametrize("kind", sorted(set(MANIFESTS) - CUSTOM))
def test_schema_of_kubernetes(kind):
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate checks schemas")
    validator.validate(MANIFESTS[kind], validator.latest_version(), strict=True)


def test_schema_check_finds_mistakes():
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate checks schemas")
    damaged = {**MANIFESTS["Service"], "spec": {"ports": [{"port": "eighty"}]}}
    with pytest.raises(validator.ValidationError):
        validator.validate(damaged, validator.latest_version(), strict=True)


def test_schema_of_the_service_monitor():
    models = pytest.importorskip(
        "cloudcoil.models.prometheus_operator.v1",
        reason="pip install cloudcoil-models-prometheus-operator checks the schema of the Prometheus operator",
    )

    def is_valid(manifest):
        try:
            model = models.ServiceMonitor.model_validate(manifest)
        except ValueError:
            return False
        # The model drops fields that it does not know.
        return model.model_dump(mode="json", by_alias=True, exclude_unset=True) == manifest

    monitor = MANIFESTS["ServiceMonitor"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert is_valid(monitor)
    for damage in ({"interval": "15 s"}, {"port": 8000}, {"credentials": {}}):
        assert not is_valid({**monitor, "spec": {**monitor["spec"], "endpoints": [{**endpoint, **damage}]}})


def test_fields_of_the_kustomization():
    kustomization = MANIFESTS["Kustomization"]
    assert kustomization["apiVersion"] == "kustomize.config.k8s.io/v1beta1"
    # kustomize refuses unknown fields. These are the documented ones that are used here, with their types.
    types = {
        "apiVersion": str,
        "kind": str,
        "namespace": str,
        "labels": [{"pairs": {str: str}, "includeSelectors": bool}],
        "resources": [str],
        "images": [{"name": str, "newName": str, "newTag": str}],
    }
    assert has_type(kustomization, types)
    for damage in ({"resource": []}, {"images": [{"name": "outrider", "newTag": 0.1}]}, {"namespace": None}):
        assert not has_type({**kustomization, **damage}, types)
    assert kustomization["namespace"] == MANIFESTS["Namespace"]["metadata"]["name"]
    (image,) = kustomization["images"]
    assert image["name"] == CONTAINER["image"]
    (label,) = kustomization["labels"]
    # Selectors of a Deployment cannot be changed later.
    assert label["includeSelectors"] is False
    assert label["pairs"].items() <= POD["metadata"]["labels"].items()


def has_type(value, expected):
    """Return whether a value has a type: a class, [type of the items], {str: type} or {key: type of its value}."""
    if isinstance(expected, type):
        return isinstance(value, expected)
    if not isinstance(value, type(expected)):
        return False
    if isinstance(expected, list):
        return all(has_type(item, expected[0]) for item in value)
    if str in expected:
        return all(isinstance(key, str) and has_type(item, expected[str]) for key, item in value.items())
    return value.keys() == expected.keys() and all(has_type(item, expected[key]) for key, item in value.items())


def test_kustomization_lists_every_manifest():
    listed = set(MANIFESTS["Kustomization"]["resources"])
    assert listed == {file.name for file in FOLDER.glob("*.yaml")} - {"kustomization.yaml", "adapter-rules.yaml"}


def test_selectors_match_the_pods():
    labels = POD["metadata"]["labels"]
    for kind, path in (
        ("Deployment", ("selector", "matchLabels")),
        ("Service", ("selector",)),
        ("PodDisruptionBudget", ("selector", "matchLabels")),
    ):
        selector = MANIFESTS[kind]["spec"]
        for name in path:
            selector = selector[name]
        assert selector.items() <= labels.items()
    monitored = MANIFESTS["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
    assert monitored.items() <= MANIFESTS["Service"]["metadata"]["labels"].items()
    target = MANIFESTS["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", MANIFESTS["Deployment"]["metadata"]["name"])


def test_ports_and_paths_exist():
    port, path = CONTAINER["ports"][0], "/health"
    assert f"EXPOSE {port['containerPort']}" in (ROOT / "deploy" / "Dockerfile").read_text()
    source = (ROOT / "outrider" / "serve" / "app.py").read_text()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert CONTAINER[probe]["httpGet"] == {"path": path, "port": port["name"]}
    (endpoint,) = MANIFESTS["ServiceMonitor"]["spec"]["endpoints"]
    for route in (path, endpoint["path"]):
        assert f'@app.get("{route}"' in source
    assert endpoint["port"] == MANIFESTS["Service"]["spec"]["ports"][0]["name"]


def test_options_exist_and_the_drain_is_long_enough():
    options = {}
    for text in CONTAINER["args"]:
        name, value = re.fullmatch(r"--([a-z-]+)=(.*)", text).groups()
        options[name] = value
    assert {name.replace("-", "_") for name in options} <= as_json(Settings()).keys()
    sleep = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["spec"]["terminationGracePeriodSeconds"] > sleep + int(options["shutdown-timeout"])
    mounts = {each["mountPath"]: each for each in CONTAINER["volumeMounts"]}
    assert str(Path(options["api-keys"]).parent) in mounts
    assert mounts["/models"]["readOnly"]
    assert {each["name"] for each in mounts.values()} == {each["name"] for each in POD["spec"]["volumes"]}


def test_user_and_cache_are_those_of_the_image():
    image = (ROOT / "deploy" / "Dockerfile").read_text()
    assert f"--uid {POD['spec']['securityContext']['runAsUser']} " in image
    assert "XDG_CACHE_HOME=/var/cache/outrider" in image


def test_autoscaler_uses_metrics_of_the_adapter_and_of_the_server():
    rules = yaml.safe_load((FOLDER / "adapter-rules.yaml").read_text())["rules"]["custom"]
    made = set()
    source = (ROOT / "outrider" / "serve" / "monitoring" / "metrics.py").read_text()
    for rule in rules:
        series = rule["seriesQuery"].partition("{")[0]
        template = re.sub(r"\$\{?1\}?", r"\\1", rule["name"]["as"])
        made.add(re.sub(rule["name"]["matches"], template, series))
        name = series.removeprefix("outrider_").removesuffix("_total")
        assert f'"{name}"' in source
    used = {each["pods"]["metric"]["name"] for each in MANIFESTS["HorizontalPodAutoscaler"]["spec"]["metrics"]}
    assert used == made


def test_service_links_do_not_set_the_port():
    """Kubernetes sets OUTRIDER_PORT to an address for a service called outrider, and the server would read it."""
    assert MANIFESTS["Service"]["metadata"]["name"] == "outrider"
    assert POD["spec"]["enableServiceLinks"] is False
