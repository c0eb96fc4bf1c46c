"""The quickstart notebook, run as in examples/, with fewer steps."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import mava

REPOSITORY = Path(mava.__file__).parents[1]


@pytest.mark.slow
def test_the_quickstart_runs(tmp_path):
    text = (REPOSITORY / "examples" / "quickstart.ipynb").read_text()
    assert text.count("system.total_timesteps=1e5") == 2
    few = "arch.num_eval_episodes=8 arch.num_absolute_metric_eval_episodes=8"
    text = text.replace("total_timesteps=1e5", f"total_timesteps=2.1e4 {few}")
    folder = tmp_path / "examples"
    folder.mkdir()
    (tmp_path / "mava").symlink_to(REPOSITORY / "mava")
    (folder / "quickstart.ipynb").write_text(text)
    binaries = Path(sys.executable).parent
    path = f"{binaries}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "JAX_NUM_CPU_DEVICES": "1"}
    execute = [sys.executable, "-m", "jupyter", "execute", "--inplace", "quickstart.ipynb"]
    subprocess.run(execute, cwd=folder, env=env, check=True)  # fails with any cell
    cells = nbformat.read(folder / "quickstart.ipynb", 4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert not [x.text for x in outputs if x.output_type == "stream" and x.name == "stderr"]
    kinds = {kind for x in outputs for kind in x.get("data", {})}
    assert {"image/png", "image/gif", "text/markdown"} <= kinds
    assert outputs[-1].text.startswith("return ")
    assert len(list(folder.glob("results/*/*/*/seed_[012]/*/metrics.json"))) == 6
    assert (folder / "plots" / "report.html").exists()
