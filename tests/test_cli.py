"""The command line: bad input, sweeps, forks, and the README's commands."""

import contextlib
import io
import json
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from mava import config as configuration
from mava import evaluate, experiment, render, vault
from mava.checkpoints import list_checkpoints
from mava.experiment import forget_programs
from tests.conftest import num_memory_maps
from tests.running import SYSTEMS, TINY, network_of, read_metrics, run_folder, tiny, train

ROOT = SYSTEMS.parent.parent
CONV = (  # a torso that needs an image
    "~network.actor_network.pre_torso",
    "+network.actor_network.pre_torso={_target_:flax.linen.Conv,features:4,kernel_size:[3,3,3]}",
)


def run_cli(monkeypatch, system, *overrides):
    """Runs a system's command line in this process; returns its exit code and standard error."""
    file = str(SYSTEMS / f"{system}.py")
    monkeypatch.setattr(sys, "argv", [file, *overrides])
    GlobalHydra.instance().clear()
    output, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
        try:
            experiment.main(file, network=network_of(system))
        except SystemExit as end:
            if isinstance(end.code, str):  # Python prints it and exits with 1
                return 1, error.getvalue() + end.code
            return end.code, error.getvalue()
    return 0, error.getvalue()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["system.gama=0.9"], "Key 'gama' not in 'Config'"),
        (["system.gamma=abc"], "Value 'abc' of type 'str' could not be converted to Float"),
        (["system.gamma=1.5"], "gamma=1.5 must be between 0 and 1."),
        (["system.clip_eps=0"], "clip_eps=0.0 must be above 0."),
        (["system.actor_lr=nan"], "actor_lr=nan must be above 0."),
        (["system.seed=-1"], "seed=-1 must be between 0 and 2**32 - 1."),
        (["arch.num_envs=0"], "arch.num_envs=0 must be at least 1."),
        (["arch.num_devices=99"], "arch.num_devices=99, but there are 2 (cpu)."),
        (["system.num_minibatches=3"], "num_minibatches=3 must divide rollout_length * num_envs"),
        (["resume=nowhere"], "nowhere is no folder."),
        (["logger.checkpointing.load_model=true"], "needs a run folder in"),
        (["logger.checkpointing.load_args.run=x"], "is only read with"),
        (
            [
                "logger.checkpointing.load_model=true",
                "logger.checkpointing.load_args.run=x",
                "logger.checkpointing.load_args.checkpoint=best",
            ],
            "load_args.checkpoint=best must be last or a number of steps",
        ),
        (["logger.checkpointing.max_to_keep=0"], "max_to_keep=0 must be at least 1."),
        (["logger.vault.every=0"], "logger.vault.every=0 must be at least 1."),
        (["logger.vault.max_megabytes=0"], "logger.vault.max_megabytes=0.0 must be above 0."),
        (["vault=nowhere"], "nowhere holds no vault."),
        (["logger.render_every=0"], "logger.render_every=0 must be at least 1."),
        (["logger.wandb.mode=maybe"], "logger.wandb.mode=maybe must be online or offline."),
        (["logger.custom=[nowhere.Csv]"], "logger.custom=[nowhere.Csv] can't be imported: Import"),
        (["env=chess"], "Available options in 'env':\n\tcleaner\n\tcoin_game\n\tconnector"),
        (
            ["env/scenario=huge"],
            "Available options in 'env/scenario':\n\t10m_vs_11m\n\t10x10-3p-3f",
        ),
        (["env=lbf", "env/scenario=tiny-2ag"], "tiny-2ag is a scenario of RobotWarehouse, not of"),
        (["env.factory=nowhere.Env"], "env.factory=nowhere.Env can't be imported"),
        (["env=lbf", "env.kwargs.time_limit=x", "env.scenario.task_config.fov=99"], "refuses"),
        (["env.kwargs.time_limit=0"], "time_limit=0 must be an integer of at least 1."),
        (["system.total_timesteps=1e4"], "fewer than arch.num_evaluation=100"),
        (
            ["system.total_timesteps=inf"],
            "system.total_timesteps=inf must be finite and at least 1.",
        ),
        (["system.total_timesteps=-5"], "system.total_timesteps=-5 must be finite and at least 1."),
        (["logger.profile=100"], "logger.profile=100 must be a block from 0 to 99."),
        (["network.actor_network.pre_torso.layer_sizes=[0]"], "layer_sizes=[0] must be positive"),
        (["network.actor_network.pre_torso.activation=rellu"], "activation=rellu is no function"),
        (["~network.critic_network"], "ff_ippo needs 'critic_network' in its network config."),
        (
            ["network=rnn"],
            "ff_ippo has no use for network.actor_network.cell, network.actor_network",
        ),
        (CONV, "does not fit the observation, agents_view (N, O) = (2, 68)"),
        (
            ["network=cnn"],
            "RobotWarehouse shows each agent a vector, not a grid (network.view=grid)",
        ),
        (["network=cnn", "network.view=flat"], "does not fit the observation, agents_view (N, O)"),
        (["network.view=round"], "network.view=round must be flat or grid."),
        (["env.scenario.task_config.num_agents=0"], "num_agents=0 must be an integer of at least"),
        (["env=lbf", "env.kwargs.team_reward=no"], "team_reward=no must be true or false."),
        (
            ["env=overcooked", "env.kwargs.shaped_reward=x"],
            "could not convert string to float: 'x'",
        ),
        (["env=matrax", "env.scenario.task_config.task=5"], "task=5 must be Climbing, Penalty-0,"),
        (
            ["env=mpe", "+env.kwargs.num_agent=5"],
            "simple_spread_v3 has no option num_agent; it has",
        ),
    ],
)
def test_bad_input_is_one_sentence(overrides, message, monkeypatch, tmp_path):
    """Before anything is compiled, and nothing is left behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiment, "compile_programs", None)
    code, error = run_cli(monkeypatch, "ff_ippo", *overrides)
    assert code == 1
    assert message in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["network=mlp"], "rec_mappo needs 'cell' in its network config."),
        (["system.recurrent_chunk_size=48"], "recurrent_chunk_size=48 must divide rollout_length="),
        (["system.recurrent_chunk_size=0"], "recurrent_chunk_size=0 must divide rollout_length="),
        (
            ["system.num_minibatches=3", "system.recurrent_chunk_size=64"],
            "num_minibatches=3 must divide num_envs * rollout_length / recurrent_chunk_size = 32",
        ),
        (["env=smax", "+env.kwargs.num_allies=7"], "unexpected keyword argument 'num_allies'"),
        (
            ["env=smax", "env.kwargs.walls_cause_death=5"],
            "walls_cause_death=5 must be true or false",
        ),
        (
            ["env=smax", "env.kwargs.time_limit=3.5"],
            "time_limit=3.5 must be an integer of at least",
        ),
        (["env=mpe", "env.kwargs.action_type=both"], "action_type=both must be discrete or contin"),
        (["network.hidden_state_dim=0"], "hidden_state_dim=0 must be an integer of at least 1."),
        (
            ["network.hidden_state_dim=abc"],
            "hidden_state_dim=abc must be an integer of at least 1.",
        ),
        (["network.hidden_state_dim=null"], "hidden_state_dim=None must be an integer of at least"),
        (
            ["network.hidden_state_dim=1.5"],
            "hidden_state_dim=1.5 must be an integer of at least 1.",
        ),
        (
            [
                "network.actor_network.cell._target_=flax.linen.ConvLSTMCell",
                "+network.actor_network.cell.kernel_size=[3]",
            ],
            "is no recurrent cell",
        ),
        (["network.actor_network.cell._target_=flax.linen.Dense"], "is no recurrent cell"),
        (["env=smax", "env/scenario=tiny-2ag"], "of SMAX, which has: 10m_vs_11m, 25m, 27m_vs_30m"),
        (["env=smax", "env.scenario.task_config.scenario=9m"], "scenario=9m must be one of 3m, 2s"),
        (["env=smax", "env.kwargs.attack_mode=none"], "attack_mode=none must be closest or random"),
    ],
)
def test_bad_input_of_recurrent_systems_is_one_sentence(overrides, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiment, "compile_programs", None)
    code, error = run_cli(monkeypatch, "rec_mappo", *overrides)
    assert code == 1
    assert message in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_results_folder(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "results"
    monkeypatch.setattr(experiment, "compile_programs", None)
    code, error = run_cli(monkeypatch, "ff_ippo", f"logger.base_exp_path={path}")
    assert code == 1
    assert f"logger.base_exp_path={path}: can't write" in error


def test_an_unwritable_cache_is_one_warning(tmp_path):
    from mava.devices import use_compilation_cache

    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="Compiling without a cache: can't write") as caught:
        use_compilation_cache(str(tmp_path / "file" / "cache"))
    assert len(caught) == 1


def test_in_a_sweep_a_bad_job_does_not_stop_the_others(monkeypatch, tmp_path):
    """All that failed are listed at the end; nothing but the results is left behind."""
    monkeypatch.chdir(tmp_path)
    gammas = "system.gamma=1.5,0.9,-1"
    code, error = run_cli(monkeypatch, "ff_ippo", "-m", "env=lbf", *TINY, gammas)
    assert code == 1
    said, listed = error.split("Failed jobs, 2; the others are complete:\n")
    for job, gamma in ((0, 1.5), (2, -1)):
        reason = f"Bad option: gamma={gamma:.1f} must be between 0 and 1."
        assert f"Job {job} failed: {reason}" in said
        assert re.search(rf"job {job}, env=lbf .*system.gamma={gamma}: {reason}\n", listed)
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
    assert "absolute_metrics" in read_metrics(tmp_path / "results")


def test_finished_runs_are_skipped(monkeypatch, tmp_path):
    """Those of the same config and system file; others are run."""
    monkeypatch.chdir(tmp_path)
    options = ("env=lbf", *TINY, "arch.num_devices=1", "skip_finished=true")
    assert run_cli(monkeypatch, "ff_ippo", *options)[0] == 0

    def run_anew(*_):
        raise configuration.UserError("run anew")

    monkeypatch.setattr(experiment, "compile_programs", run_anew)
    assert run_cli(monkeypatch, "ff_ippo", "-m", *options)[0] == 0
    assert "run anew" in run_cli(monkeypatch, "ff_ippo", *options, "arch.num_seeds=2")[1]
    assert "run anew" in run_cli(monkeypatch, "ff_ippo", *options, "system.gamma=0.9")[1]
    assert "run anew" in run_cli(monkeypatch, "ff_ippo", *options, "skip_finished=false")[1]
    (metrics,) = [x for x in tmp_path.rglob("metrics.json") if "absolute" in x.read_text()]
    metrics.write_text(metrics.read_text().replace("absolute_metrics", "step_99"))
    assert "run anew" in run_cli(monkeypatch, "ff_ippo", *options)[1]  # it was stopped


def test_a_sweep_frees_the_programs_of_its_jobs(monkeypatch, tmp_path):
    """A process may have 65,530 memory maps; the programs of a job take more than a thousand."""
    monkeypatch.chdir(tmp_path)
    forget_programs()
    before = num_memory_maps()
    assert run_cli(monkeypatch, "ff_ippo", "-m", "env=lbf", *TINY, "system.seed=0,1")[0] == 0
    assert num_memory_maps() < before + 500


def start(*arguments, cwd, **options):
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """A copy of a system outside of the package, changed as docs/forking.md has it."""
    text = (SYSTEMS / "ff_mappo.py").read_text()
    document = (SYSTEMS.parents[1] / "docs" / "forking.md").read_text()
    changes = re.findall(r"```diff\n(.*?)```", document, re.DOTALL)
    assert len(changes) == 2
    for change in changes:
        lines = change.splitlines()
        old, new = ("\n".join(x[1:] for x in lines if x[0] in sign) for sign in (" -", " +"))
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file = tmp_path_factory.mktemp("fork") / "my_idea.py"
    file.write_text(text)
    return file


def test_a_fork_runs_from_anywhere_also_in_a_sweep(fork, tmp_path):
    process = start(fork, "-m", "env=lbf", *TINY, "system.kl_coef=0.25,0.5", cwd=tmp_path)
    output, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert "my_idea on LevelBasedForaging 2s-8x8-2p-2f-coop" in output
    assert output.count(", kl_penalty ") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
    assert sorted(path.name for path in fork.parent.iterdir()) in (
        ["my_idea.py"],
        ["__pycache__", "my_idea.py"],
    )
    copies = sorted(tmp_path.glob("results/my_idea/*/*/seed_42/*/my_idea.py"))
    assert len(copies) == 2
    assert all("kl_coef: float" in copy.read_text() for copy in copies)

    runs = [copy.parent.relative_to(tmp_path) for copy in copies]
    process = start(fork, "-m", f"resume={runs[0]},{runs[1]}", "system.num_updates=3", cwd=tmp_path)
    output, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert output.count("Going on after 128 of 192 environment steps.") == 2

    folder = tmp_path / runs[0]
    evaluate.main([f"run={folder}", f"json={tmp_path / 'result.json'}"])
    result = json.loads((tmp_path / "result.json").read_text())["metrics"]
    record = json.loads((folder / "metrics.json").read_text())
    for _ in range(4):  # environment, task, system, seed
        (record,) = record.values()
    absolute = record["absolute_metrics"]["mean_episode_return"]
    assert [result["mean_episode_return"]["mean"]] == absolute
    render.main([f"run={folder}", f"out={tmp_path / 'episode.gif'}", "env.kwargs.time_limit=3"])
    assert (tmp_path / "episode.gif").stat().st_size > 1000


def test_the_commands_for_trained_policies_start(tmp_path):
    """And what is wrong is one sentence on standard error."""
    for command in ("mava.evaluate", "mava.render"):
        process = start("-m", command, f"run={tmp_path}", cwd=tmp_path)
        output, error = process.communicate(timeout=60)
        assert (process.returncode, output) == (1, "")
        assert error.startswith(f"{tmp_path} is no run folder")
        assert len(error.splitlines()) == 1


def test_a_fork_refuses_what_it_does_not_know(fork, tmp_path):
    process = start(fork, "system.kl_coeff=1", cwd=tmp_path)
    assert "Key 'kl_coeff' not in 'Config'" in process.communicate(timeout=60)[1]
    assert process.returncode == 1


def test_sigterm_ends_a_real_process_in_order(tmp_path):
    """The block in flight finishes, the JSON is valid, the exit code is 143."""
    long = [*TINY, "system.num_updates=4000000", "arch.num_evaluation=400000"]
    process = start(SYSTEMS / "ff_ippo.py", "env=lbf", *long, cwd=tmp_path)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("[") and "steps" in line:  # an evaluation was logged
            break
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    _, error = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert process.returncode == 143, error
    assert re.search(
        r"Stopped by signal 15 after [\d,]+ environment steps; to go on: resume=", error
    )
    assert "Traceback" not in error
    assert "step_0" in read_metrics(tmp_path / "results")
    assert list_checkpoints(run_folder(tmp_path) / "checkpoints")


def readme_commands():
    """The indented command lines of the README that train (test_autoscale.py has the search)."""
    lines = (line.strip() for line in (ROOT / "README.md").read_text().splitlines())
    pattern = r"(python|make train)\b.*(env|my_idea|\$RUN|\$VAULT)"
    return [line for line in lines if re.match(pattern, line) and "mava.autoscale" not in line]


def is_of_vaults(command):
    return "$VAULT" in command or "logger.vault" in command


def test_readme_names_existing_things():
    text = (ROOT / "README.md").read_text()
    assert len(readme_commands()) >= 6
    for path in re.findall(r"(?:mava|benchmarks|docs|examples)/[\w/]+\.(?:py|md|ipynb)", text):
        assert (ROOT / path).exists(), path
    targets = re.findall(r"^ {4}make (\w+)", text, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert targets
    assert all(f"\n{target}: install" in makefile for target in targets)


@pytest.mark.parametrize(
    "command", [x for x in readme_commands() if "$" not in x and not is_of_vaults(x)]
)
def test_readme_command_runs(command, fork, tmp_path, monkeypatch, capsys):
    """As written, but tiny; but for the first, in this process."""
    words = shlex.split(command, comments=True)
    in_process = words[0] != "make"
    if not in_process:  # what the target does, in the environment of the tests
        words = ["python", "mava/systems/ff_mappo.py", words[2].removeprefix("ARGS=")]
    words = words[1:]
    (tmp_path / "mava").symlink_to(ROOT / "mava")
    (tmp_path / "my_idea.py").write_text(fork.read_text())
    # What is given last counts: the test's own sizes, but for sweeps.
    options = tiny(Path(words[0]).stem)
    options = [o for o in options if not any(w.startswith(o.split("=")[0] + "=") for w in words)]
    options = [o for o in options if "num_updates" not in o or "total_timesteps" not in command]
    words = [re.sub(r"total_timesteps=.*", "total_timesteps=500", word) for word in words]
    words = [re.sub(r"seed=0,1,2", "seed=0", word) for word in words]
    words += [] if "--help" in words else options
    if in_process:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", words)
        monkeypatch.delitem(sys.modules, "my_idea", raising=False)
        GlobalHydra.instance().clear()
        runpy.run_path(words[0], run_name="__main__")
        output = capsys.readouterr().out
    else:
        process = start(*words, cwd=tmp_path)
        output, error = process.communicate(timeout=600)
        assert process.returncode == 0, error
    if "--help" not in words:
        assert "best parameters: return" in output
        count = 3 if "num_seeds=3" in command else 1 + ("rware,lbf" in command)
        assert len(list(tmp_path.rglob("metrics.json"))) == count


def test_readme_commands_on_a_vault(tmp_path, monkeypatch):
    """One after the other, in this process, but tiny."""
    monkeypatch.chdir(tmp_path)
    commands = [command for command in readme_commands() if is_of_vaults(command)]
    assert len(commands) == 4
    for command in commands:
        folder = next(tmp_path.glob("results/ff_ippo/*/*/*/*"), None)
        words = shlex.split(command.replace("$VAULT", str(folder)))[1:]
        if words[0] == "-m":
            vault.main(words[2:])
            continue
        system = Path(words[0]).stem
        options = [x for x in words[1:] if "num_updates" not in x and "timesteps" not in x]
        options += ["env.kwargs.time_limit=10"] * (system == "ff_ippo")
        assert run_cli(monkeypatch, system, *options, *tiny(system)) == (0, "")
        (config,) = tmp_path.glob(f"results/{system}/LevelBasedForaging/*/*/*/config.yaml")
        assert "time_limit: 10" in config.read_text()  # the environment is that of the vault


def test_readme_commands_on_a_finished_run(tmp_path, monkeypatch):
    """One after the other, in this process; the first that goes on has nothing left to do."""
    train("ff_mappo", *TINY, "env=lbf", "logger.use_console=false",
          f"logger.base_exp_path={tmp_path}")  # fmt: skip
    folder = run_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    commands = [command for command in readme_commands() if "$RUN" in command]
    assert len(commands) == 5
    for command in commands:
        command = command.replace("$RUN", str(folder)).replace("4e6", "300")
        command = command.replace("num_episodes=1000", "num_episodes=10")
        words = shlex.split(command)[1:]
        if words[0].endswith("ff_mappo.py"):
            assert run_cli(monkeypatch, "ff_mappo", *words[1:]) == (0, "")
        else:
            main = {"mava.evaluate": evaluate.main, "mava.render": render.main}[words[1]]
            main(words[2:])
    assert "step_2" in read_metrics(tmp_path)
    # Checked against what is stored, not against the default environment, which lacks this option.
    options = (f"resume={folder}", "system.total_timesteps=400", "env.kwargs.team_reward=false")
    assert run_cli(monkeypatch, "ff_mappo", *options) == (0, "")
    assert "step_3" in read_metrics(tmp_path)
    assert "team_reward: false" in (folder / "config.yaml").read_text()
    assert (tmp_path / "results.json").exists()
    assert (tmp_path / "episodes.gif").exists()


def test_run_folder_is_under_the_system_name(monkeypatch, tmp_path):
    options = (f"logger.base_exp_path={tmp_path}", "logger.system_name=mine", "env=lbf")
    assert run_cli(monkeypatch, "ff_ippo", *TINY, *options)[0] == 0
    assert run_folder(tmp_path).relative_to(tmp_path).parts[0] == "mine"
