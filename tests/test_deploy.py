"""Files for deployment: they parse, name what exists, and give servers what they need. No container is run here."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.harness import run_here

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


def compose() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))


def instructions() -> list[tuple[str, str]]:
    """Each instruction of the Dockerfile with its words."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


def unit() -> configparser.ConfigParser:
    found = configparser.ConfigParser(strict=False, interpolation=None)
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read(DEPLOY / "medusa.service", encoding="utf-8")
    return found


def flags_of_serve() -> set[str]:
    return set(re.findall(r"--[a-z][a-z-]+", run_here("serve", "--help").out))


def used_flags() -> set[str]:
    """All flags that are given to `medusa serve`."""
    words = [str(word) for word in compose()["services"]["medusa"]["command"]]
    words += shlex.split(unit()["Service"]["ExecStart"])
    for name, rest in instructions():
        if name in ("ENTRYPOINT", "CMD"):
            words += yaml.safe_load(rest)
    return {word for word in words if word.startswith("--") and word != "--"}


def test_every_flag_that_is_given_is_one_of_serve() -> None:
    assert used_flags()
    assert used_flags() <= flags_of_serve()


def test_what_the_image_copies_is_there_and_let_through() -> None:
    copied = [
        word for name, rest in instructions() if name == "COPY" and "--from" not in rest for word in rest.split()[:-1]
    ]
    let_through = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert len(copied) >= 5
    for word in copied:
        name = word.removeprefix("./")
        assert (ROOT / name).exists()
        assert f"!{name.partition('/')[0]}" in let_through


def test_the_image_runs_as_nobody_takes_signals_and_tells_its_health() -> None:
    found = dict(instructions())
    assert found["USER"].isdigit()
    assert int(found["USER"]) > 0
    first = yaml.safe_load(found["ENTRYPOINT"])  # a list: a shell in between would keep signals from the server
    assert first[:2] == ["tini", "--"], "the system keeps signals from a first process that doesn't ask for them yet"
    assert any(name == "RUN" and re.search(r"apt-get install .* tini\b", rest) for name, rest in instructions())
    assert "/health" in found["HEALTHCHECK"]
    assert not re.search(r"(?i)(key|secret|token|password)\s*=", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"))


def test_what_changes_often_is_installed_last_and_torch_is_the_pinned_one() -> None:
    found = instructions()
    needs = next(place for place, (name, rest) in enumerate(found) if name == "RUN" and "-c pins.txt" in rest)
    package = found.index(("COPY", "medusa_cli ./medusa_cli"))
    assert needs < package, "a change of the package must not install all that it needs anew"
    assert "--no-deps --force-reinstall" in found[package + 2][1]
    pin = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pin
    assert ("ARG", f"TORCH={pin[1]}") in found


def test_files_that_compose_mounts_are_there_but_for_secrets() -> None:
    document = compose()
    mounted = [each.split(":")[0] for service in document["services"].values() for each in service.get("volumes", [])]
    for source in mounted:
        assert source in document["volumes"] or (DEPLOY / source).exists()
    for service in document["services"].values():
        assert set(service.get("depends_on", [])) <= set(document["services"])
        assert set(service.get("secrets", [])) <= set(document["secrets"])
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "open to others only where somebody says so"
    assert "--maxmemory-policy" in document["services"]["redis"]["command"]


def test_compose_reads_its_file() -> None:
    library = pytest.importorskip(
        "compose_spec", reason="compose-spec, which knows what compose takes, is not installed"
    )
    read = library.PyCompose.from_yaml((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    assert set(read.service_names()) == set(compose()["services"])


def test_prometheus_and_grafana_look_where_the_server_is() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["medusa:8000"]
    folder = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yaml").read_text(encoding="utf-8"))["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((folder / "dashboards" / "medusa.yaml").read_text(encoding="utf-8"))["providers"]
    mounts = compose()["services"]["grafana"]["volumes"]
    assert any(each.split(":")[1].startswith(provider["options"]["path"]) for each in mounts)


def test_the_unit_gives_texts_time_to_end_and_the_server_few_rights() -> None:
    service = unit()["Service"]
    assert int(service["TimeoutStopSec"]) > 30
    assert service["NoNewPrivileges"] == service["ProtectHome"] == service["DynamicUser"] == "yes"


def test_keys_reach_the_server_without_being_readable_for_others() -> None:
    service = (DEPLOY / "medusa.service").read_text(encoding="utf-8")
    (name,) = re.findall(r"^LoadCredential=(\w+):/etc/medusa/keys$", service, re.MULTILINE)
    assert f"\nEnvironment=MEDUSA_API_KEY=%d/{name}\n" in service
    assert not re.search(r"(?i)--(api-key|pool-secret)", unit()["Service"]["ExecStart"]), "a command line is no secret"


@pytest.mark.parametrize(
    "check", [["verify"], ["security", "--offline=true", "--threshold=25"]], ids=["verify", "security"]
)
def test_systemd_finds_nothing_wrong_and_few_rights(check: list[str], tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on the path")
    here = tmp_path / "medusa.service"
    text = (DEPLOY / "medusa.service").read_text(encoding="utf-8")
    here.write_text(text.replace("/opt/medusa/bin/python", sys.executable), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", *check, str(here)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr, "a word that systemd doesn't know is only a warning"


def test_what_is_sent_as_source_holds_what_these_tests_read(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (file,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = [
        str(each.relative_to(ROOT))
        for folder in ("deploy", "docs", "recipes", "medusa_cli/serve")
        for each in (ROOT / folder).rglob("*")
        if each.is_file() and "__pycache__" not in each.parts
    ]
    assert {"README.md", "LICENSE", "CONTRIBUTING.md", "Makefile", "constraints.txt", *tracked} <= names


CHECKS = {
    "promtool": ["promtool", "check", "config", str(DEPLOY / "prometheus.yml")],
    "hadolint": ["hadolint", "--failure-threshold", "warning", str(DEPLOY / "Dockerfile")],
}


@pytest.mark.parametrize("program", CHECKS)
def test_the_tools_own_checks_pass(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not on the path")
    done = subprocess.run(CHECKS[program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
