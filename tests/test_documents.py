"""Documents say what the code does: rendered ones are fresh, named files exist, commands are those of the gate."""

import re
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest
import script

from dflash import documents

README = (script.ROOT / "README.md").read_text()
SKILL = (script.ROOT / "SKILL.md").read_text()


def test_the_skill_text_is_what_its_template_renders():
    assert documents.skill() == SKILL, "run: python -m dflash.documents"


def test_the_skill_text_is_short_and_its_description_within_limits():
    assert SKILL.count("\n") < 300
    description = re.search(r'^description: "(.*)"$', SKILL, re.MULTILINE)[1]
    assert 250 <= len(description) <= 450 and not {"<", ">"} & set(description)


def test_every_script_that_the_documents_name_exists():
    named = set(re.findall(r"scripts/\w+\.py", README + SKILL))
    assert {"scripts/generate.py", "scripts/resolve_draft.py", "scripts/benchmark.py"} <= named
    assert all((script.ROOT / name).is_file() for name in named)


def test_every_flag_that_the_documents_use_is_one_of_the_scripts():
    known = ""
    for name in ("generate", "resolve_draft", "benchmark"):
        call = [sys.executable, str(script.ROOT / "scripts" / f"{name}.py"), "--help"]
        known += subprocess.run(call, capture_output=True, text=True, check=True).stdout.replace(
            "[no-]", "no-"
        )
    for command in re.findall(r"(?:generate|resolve_draft|benchmark)\.py.*", README + SKILL):
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", command):
            assert flag in known or flag.replace("--no-", "--") in known, f"{flag} in {command}"


def tracked():
    if not (script.ROOT / ".git").exists():
        pytest.skip("not a git checkout: what is tracked cannot be listed")
    listed = subprocess.run(["git", "ls-files"], cwd=script.ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


def test_nothing_is_tracked_that_installers_drop_or_change():
    files = tracked()
    assert not [name for name in files if name.rpartition("/")[2] == "metadata.json"]
    assert [name for name in files if name.rpartition("/")[2] == "SKILL.md"] == ["SKILL.md"]
    assert not [name for name in files if (script.ROOT / name).is_symlink()]
    assert sum((script.ROOT / name).stat().st_size for name in files) < 25_000_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(script.ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_the_engine_its_templates_and_the_bundled_draft(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "dflash/templates/SKILL.md.j2" in names
    assert "dflash/templates/report.html.j2" in names
    assert "dflash/models/registry.toml" in names
    assert "dflash/bench/prompts.toml" in names
    assert "dflash/data/smollm2-135m-dflash/model.safetensors" in names
    assert not [name for name in names if name.startswith(("tests/", "scripts/"))]


def test_the_installed_command_answers_help_and_finds_its_templates(wheel, tmp_path):
    """Installed without dependencies: what needs none must work, and must not reach into the checkout."""
    venv.create(tmp_path / "env", with_pip=False, system_site_packages=False)
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    python = tmp_path / "env" / "bin" / "python"
    call = "import sys; from dflash.cli import main; sys.exit(main(['generate', '--help']))"
    shown = subprocess.run([python, "-c", call], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "--max-tokens" in shown.stdout
    shutil.rmtree(tmp_path / "env")
