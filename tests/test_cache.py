"""torch's cache of compiled functions: a second start finds them all, but not those of another gradient or another kind of CPU."""

import json

import pytest
from conftest import environment, newest_run, read_metrics, run_script

RUN = """
import json, sys
import torch._dynamo.utils
import ppo_lstm_puffer as ppo

factor, original = FACTOR, ppo.lstm_backward
if factor != 1:  # what a fork may change
    def lstm_backward(*arguments):
        dgates, dh, dc = original(*arguments)
        return factor * dgates, dh, dc
    ppo.lstm_backward = lstm_backward
code = ppo.main()
print(json.dumps(torch._dynamo.utils.counters["aot_autograd"]))
sys.exit(code)
"""


def compiled_run(factor: float, folder, **variables) -> tuple[dict, float]:
    """The cache's counters, and the gradient's norm at the end of a small compiled run with its compile cache in folder."""
    (folder / "run.py").write_text(RUN.replace("FACTOR", str(factor)))
    arguments = [
        "--num-steps",
        "2",
        "--minibatch-size",
        "16",
        "--total-timesteps",
        "64",
        "--compile",
    ]
    where = environment() | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")} | variables
    result = run_script(*arguments, cwd=folder, script=folder / "run.py", env=where, timeout=1200)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1]), read_metrics(newest_run(folder))[-1][
        "losses/grad_norm"
    ]


def test_second_start_finds_every_function_but_none_of_another_gradient_or_another_kind_of_cpu(
    tmp_path,
):
    first, norm = compiled_run(1, tmp_path)
    assert first["autograd_cache_miss"] == first["total"] >= 3
    second, same = compiled_run(1, tmp_path)
    assert second["autograd_cache_hit"] == second["total"] == first["total"]
    assert same == norm
    changed, other = compiled_run(3, tmp_path)
    assert changed["autograd_cache_miss"] == 1
    assert other != pytest.approx(norm, rel=1e-3)

    narrow, close = compiled_run(
        1, tmp_path, ATEN_CPU_CAPABILITY="default"
    )  # as on a CPU that has no vectors
    assert narrow["autograd_cache_miss"] == narrow["total"] == first["total"]
    assert close == pytest.approx(norm, rel=1e-2)
