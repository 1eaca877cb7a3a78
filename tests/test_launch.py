import re
import subprocess
from pathlib import Path

import pytest
import yaml

from pods_jax.config.command_line import parse
from pods_jax.config.entries import Config, check_devices

ROOT = Path(__file__).parents[1]
RECIPES = sorted(path for path in (ROOT / "launch").iterdir() if path.is_file())
SCRIPTS = [path for path in RECIPES if path.suffix != ".yaml"] + [ROOT / ".ci" / "run"]
DEVICES = {"tpu_pod.sh": 16, "slurm_gpu.sbatch": 16, "kubernetes.yaml": 16}


def options(path):
    """What a recipe hands to ``pods_jax.train``: every ``--section.field VALUE`` and ``--section.field=VALUE`` in it."""
    pairs = re.findall(r"--([a-z_]+\.[a-z_0-9]+)[ =]['\"]?([^\s'\"]+)", path.read_text())
    return [word for key, value in pairs for word in (f"--{key}", value)]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_valid_bash(path):
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_is_a_configuration_that_fits_its_devices(path):
    config = parse(Config, options(path), prog=path.name, description="")
    assert config.mesh.distributed
    check_devices(config, DEVICES[path.name])


def test_the_job_asks_for_the_hosts_and_chips_of_its_slice():
    service, job = yaml.safe_load_all((ROOT / "launch" / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    rows, columns = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    chips = pod["containers"][0]["resources"]["limits"]["google.com/tpu"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    assert job["spec"]["completions"] * chips == int(rows) * int(columns) == DEVICES["kubernetes.yaml"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
