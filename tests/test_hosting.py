"""What hosts and hooks read: workflows, templates, the form of commit messages."""

import re
import subprocess
from pathlib import Path

import pytest

import quaxlike as ql
from tests.matrix import PAIRS

_ROOT = Path(__file__).resolve().parents[1]
_GITHUB = _ROOT / ".github"
_FORMS = sorted((_GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("Add a thing\n\nUsers asked for it.\n", None),
        ("Add a thing\n# Please enter the commit message\n", None),
        ("x" * 72, None),
        ("×" * 72, None),
        ("fixup! " + "x" * 72, None),
        ("x" * 73, "a subject of 73 characters; at most 72"),
        ("Add a thing.", "ends with a period"),
        ("Add a thing\nUsers asked for it.", "no empty line between subject and body"),
        ("\n", "no subject"),
    ],
)
def test_the_form_of_a_commit_message(message: str, told: str | None, tmp_path: Path):
    file = tmp_path / "COMMIT_EDITMSG"
    file.write_text(message, encoding="utf-8")
    ran = subprocess.run([_ROOT / ".ci" / "commit_message", file], capture_output=True, text=True)
    assert ran.returncode == (told is not None)
    assert (told or "") in ran.stderr


def test_pre_commit_installs_the_hook():
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((_ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert "commit-msg" in config["default_install_hook_types"]
    (hook,) = (hook for repo in config["repos"] for hook in repo["hooks"] if hook["id"] == "commit-message")
    assert hook["stages"] == ["commit-msg"]
    assert (_ROOT / hook["entry"]).stat().st_mode & 0o100


def test_workflows_run_the_check_on_every_python():
    yaml = pytest.importorskip("yaml")
    run = (_ROOT / ".ci" / "run").read_text(encoding="utf-8")
    workflows = {
        path.stem: yaml.safe_load(path.read_text("utf-8")) for path in (_GITHUB / "workflows").glob("*.yml")
    }
    pythons: dict[str, set[str]] = {}
    for name, workflow in workflows.items():
        for job in workflow["jobs"].values():
            commands = [step["run"] for step in job["steps"] if "run" in step]
            assert commands == ["bash .ci/run"]
            (setup,) = (step["with"] for step in job["steps"] if "setup-python" in step.get("uses", ""))
            pythons[name] = set(setup["python-version"].split())
            for part in job.get("strategy", {}).get("matrix", {}).get("part", []):
                assert f"\n{part}() " in run
    assert pythons["full"] == {version for version, _ in PAIRS}
    readme = (_ROOT / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"workflows/(\w+)\.yml/badge\.svg", readme)) == set(workflows)


@pytest.mark.parametrize("path", _FORMS, ids=lambda path: path.name)
def test_issue_templates_are_forms(path: Path):
    yaml = pytest.importorskip("yaml")
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.name != "config.yml":
        assert {"name", "description", "body"} <= set(form)
        assert all({"type", "id", "attributes"} <= set(field) for field in form["body"])


def test_the_citation_is_of_this_version():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((_ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == ql.__version__
