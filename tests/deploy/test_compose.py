"""Tests of deploy/compose.yaml: its services agree with the image, the dashboard and each other."""

import re
from pathlib import Path

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
SERVICES = COMPOSE["services"]


def config(name):
    return yaml.safe_load(COMPOSE["configs"][name]["content"])


def test_server_is_the_image_of_the_dockerfile():
    server = SERVICES["outrider"]
    dockerfile = (DEPLOY.parent / server["build"]["dockerfile"]).read_text("utf-8")
    assert set(server["build"]["args"]) <= set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE))
    (port,) = re.findall(r"^EXPOSE (\d+)$", dockerfile, re.MULTILINE)
    assert server["ports"] == [f"127.0.0.1:{port}:{port}"]
    (cache,) = re.findall(r"^VOLUME (.*)$", dockerfile, re.MULTILINE)
    assert f"outrider-cache:{cache}" in server["volumes"]
    assert config("prometheus")["scrape_configs"][0]["static_configs"] == [{"targets": [f"outrider:{port}"]}]


def test_grafana_has_prometheus_and_the_dashboard():
    grafana = SERVICES["grafana"]
    mounted = {each["source"]: each["target"] for each in grafana["configs"]}
    assert (DEPLOY / COMPOSE["configs"]["dashboard"]["file"]).is_file()
    assert mounted["dashboard"] == grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert mounted["dashboard"].startswith(config("dashboards")["providers"][0]["options"]["path"])
    assert config("datasource")["datasources"][0]["url"] == "http://prometheus:9090"


def test_every_config_and_volume_is_declared():
    used = {each["source"] for service in SERVICES.values() for each in service.get("configs", [])}
    assert used == set(COMPOSE["configs"])
    named = {volume.split(":")[0] for service in SERVICES.values() for volume in service.get("volumes", [])}
    assert {name for name in named if not name.startswith("$")} | {"outrider-models"} == set(COMPOSE["volumes"])
