"""I10: what the scripts share is the same text. Each list is everything that a variant changes, and no more."""

import ast
import pathlib

import pytest
from conftest import ROOT, SCRIPT

DIFFERENT = {
    "ppo_lstm_puffer_ddp.py": {
        "Args", "LOSSES", "sample_segments", "draw_minibatch", "normalize_advantages", "train", "compile_hot_functions", "dashboard",
        "LIMITS", "main", "Run.__init__", "Run.log", "Run.close",
    },
    "ppo_lstm_puffer_xla.py": {
        "Args", "tanh", "UNROLL", "lstm_forward", "lstm_backward", "LSTM", "compute_advantages", "sample_segments", "act", "minibatch_loss",
        "newton_schulz", "make_optimizers", "Recorded", "train", "seed_everything", "choose_threads", "keep_freed_memory", "compile_whole_files",
        "compile_hot_functions", "fast_bfloat16", "seconds_of_product",
        "Run.__init__", "Run.profiler_step", "Run.export_trace", "Run.log", "Run.close", "serialized", "evaluate", "check_args", "main",
    },
}  # fmt: skip


def definitions(path: pathlib.Path) -> dict[str, str]:
    """The source text of every function, class, method and constant of a script."""
    source = path.read_text()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name in ("Run", "Envs", "Agent"):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    found[f"{node.name}.{method.name}"] = ast.get_source_segment(source, method)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            decorators = "".join(f"@{ast.unparse(decorator)}\n" for decorator in node.decorator_list)
            found[node.name] = decorators + ast.get_source_segment(source, node)
        elif isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = ast.get_source_segment(source, node)
    return found


@pytest.mark.parametrize("variant", DIFFERENT)
def test_shared_definitions_are_the_same_text(variant):
    reference, other = definitions(SCRIPT), definitions(ROOT / variant)
    differing = {name for name in reference if other.get(name) != reference[name]}
    assert differing == DIFFERENT[variant]
    assert len(reference) > 80
