"""Build the wheel and the source archive, and try them as somebody who installs them does.

    python experiments/checks/wheel.py [PYTHON ...]        with each of these; by default with that of this program

Needs the packages build and twine. It checks the metadata (`twine check --strict`), that the wheel holds every file of
the package that is in git, that the wheel without extras imports no optional package, that programs without their extra
name it, and that the wheel with the extra `cli` trains and predicts. Exit status 1 if a check fails.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # project root

from experiments.paths import ROOT, make_parser

CONSTRAINTS = ROOT / "constraints.txt"
# Another funcppo on the path would be taken for the installed one.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
# uses the core, then prints the optional packages that were imported
CORE = """
import sys
import funcppo as fp
assert not {"torch", "numpy"} & set(sys.modules), "importing funcppo imports PyTorch"
graph = fp.load("countries_s1")
learner = fp.ppo(env=fp.envs.cartpole(), network=fp.nets.mlp(4), n_envs=8, n_steps=8)
learner.step(learner.init(fp.random.key(0)))
optional = {"rich", "filelock", "ruamel", "matplotlib", "fastapi"}
optional |= {"prometheus_client", "tensorboard", "wandb", "mlflow"}
print("core imports", sorted(optional & set(sys.modules)))
"""
# for each extra a command that needs it beside the extra cli
LACKING = {
    "plot": "report countries_s1 --plot curves --out x.svg",
    "serve": "serve countries_s1",
    "metrics": "train countries_s1 --out r --metrics-port 1",
    "tensorboard": "train countries_s1 --out r --log tensorboard",
    "wandb": "train countries_s1 --out r --log wandb",
    "mlflow": "train countries_s1 --out r --log mlflow",
}
TRAIN = "train countries_s1 --out run --steps 512 --learner proofs --set ppo.n_envs=8 --set n_validations=1"
PREDICT = "predict run 'locatedIn(france, X)' --known"


def run(command: str, *words: object, cwd: Path, status: int = 0) -> str:
    """The output of a command, which ends with the status."""
    done = subprocess.run(
        [*shlex.split(command), *map(str, words)],
        cwd=cwd,
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    told = f"{command} {words}: status {done.returncode}\n{done.stdout}"
    assert done.returncode == status, told
    return done.stdout


def check(condition: bool, text: str) -> None:
    """Print what holds."""
    assert condition, text
    print(f"ok: {text}", flush=True)


def build(folder: Path) -> Path:
    """The wheel, built from the source archive, both checked by twine; it holds every file of the package in git."""
    python = sys.executable
    run(f"{python} -m build --outdir {folder}", ROOT, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    (archive,) = folder.glob("*.tar.gz")
    run(f"{python} -m twine check --strict", wheel, archive, cwd=folder)
    check(True, f"twine check --strict {wheel.name} {archive.name}")
    tracked = set(run("git ls-files funcppo", cwd=ROOT).split())
    with zipfile.ZipFile(wheel) as files:
        packed = {n for n in files.namelist() if n.startswith("funcppo/")}
    check(
        packed == tracked,
        f"the wheel holds the {len(tracked)} files of git; differing: {sorted(packed ^ tracked) or 'none'}",
    )
    return wheel


def install(folder: Path, python: str, requirement: str) -> Path:
    """The folder of the programs of a new environment with a requirement."""
    run(f"{python} -m venv --clear environment", cwd=folder)
    programs = folder / "environment" / "bin"
    pip = f"{programs}/pip install --quiet -c {CONSTRAINTS}"
    run(pip, requirement, cwd=folder)
    return programs


def check_core(folder: Path, python: str, wheel: Path) -> None:
    """Without extras: the library works, and each program says what it lacks."""
    programs = install(folder, python, str(wheel))
    told = run(f"{programs}/python -c", CORE, cwd=folder)
    check("core imports []" in told, "the core imports no optional package")
    version = run(f"{programs}/funcppo --version", cwd=folder).strip()
    check(version.startswith("funcppo "), f"{python}: {version}")
    told = run(f"{programs}/funcppo doctor", cwd=folder, status=2)
    check("funcppo[cli]" in told, told.strip())


def check_programs(folder: Path, python: str, wheel: Path) -> None:
    """With the extra cli: train and predict work, and the other extras are named."""
    funcppo = f"{install(folder, python, f'{wheel}[cli]')}/funcppo"
    check("usage:" in run(f"{funcppo} --help", cwd=folder), "--help")
    for extra, words in LACKING.items():
        told = run(f"{funcppo} {words}", cwd=folder, status=2)
        check(f"funcppo[{extra}]" in told, told.strip())
    run(f"{funcppo} {TRAIN} --overwrite", cwd=folder)
    told = run(f"{funcppo} {PREDICT}", cwd=folder)
    check("europe" in told, "a run is trained, and answers a query")


def main() -> int:
    """The exit status."""
    parser = make_parser(__doc__)
    parser.add_argument("python", nargs="*", default=[sys.executable])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            wheel = build(folder)
            for python in args.python:
                check_core(folder, python, wheel)
                check_programs(folder, python, wheel)
        except AssertionError as error:
            print(f"failed: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
