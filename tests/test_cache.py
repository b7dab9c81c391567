"""torch's cache of compiled functions: a start finds those of the one before, but for a changed one."""

import json

import pytest
from conftest import environment, newest_run, read_metrics, run_script

RUN = """
import json, sys
import torch._dynamo.utils
import ppo_lstm_puffer as ppo

factor = FACTOR
original = ppo.ppo_loss
if factor != 1:  # what a fork may change
    def ppo_loss(*arguments):
        loss, *rest = original(*arguments)
        return factor * loss, *rest
    ppo.ppo_loss = ppo_loss
code = ppo.main(*ppo.parse_args(sys.argv[1:]))
print(json.dumps(torch._dynamo.utils.counters["aot_autograd"]))
sys.exit(code)
"""


def compiled_run(factor: float, folder) -> tuple[dict, float]:
    """The cache's counters, and the last gradient's norm, of a small run with its cache in folder."""
    (folder / "run.py").write_text(RUN.replace("FACTOR", str(factor)))
    sizes = ["--num-steps", "2", "--minibatch-size", "16", "--total-timesteps", "64", "--compile"]
    env = environment() | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    result = run_script(*sizes, cwd=folder, script=folder / "run.py", env=env, timeout=1200)
    assert result.returncode == 0, result.stderr
    norm = read_metrics(newest_run(folder))[-1]["losses/grad_norm"]
    return json.loads(result.stdout.splitlines()[-1]), norm


def test_second_start_finds_every_function_and_a_changed_loss_is_compiled_anew(tmp_path):
    first, norm = compiled_run(1, tmp_path)
    assert first["autograd_cache_miss"] == first["total"] >= 4
    changed, other = compiled_run(3, tmp_path)
    assert changed["autograd_cache_miss"] == 1
    assert changed["autograd_cache_hit"] == first["total"] - 1
    assert other != pytest.approx(norm, rel=1e-3)
