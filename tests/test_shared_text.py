"""I10: what the scripts share is the same text. I13: one statement a line, and not too many.

The lists of I10 are everything that a variant changes, and no more.
"""

import ast
import pathlib
import subprocess
import sys

import pytest
from conftest import ROOT, SCRIPT

DIFFERENT = {
    "ppo_lstm_puffer_ddp.py": """
        Args Envs.means Run.__init__ Run.__exit__ Run.exit_reason Run.begin Run.log Run.update_done
        draw_minibatch fit_norm main open_folder resolve train""",
    "ppo_lstm_puffer_xla.py": """
        Args COMPILED CudaGraphs Run.exit_reason Run.log
        Run.save Run.update_done UNROLL fast_bfloat16 lstm_outputs main make_optimizers parse_args
        fit_norm newton_schulz resolve set_up_torch train""",
}


def definitions(path: pathlib.Path) -> dict[str, str]:
    """The source text of every function, class, method and constant of a script."""
    source = path.read_text()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name in ("Run", "Envs", "Agent"):
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    found[f"{node.name}.{method.name}"] = ast.get_source_segment(source, method)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            decorators = [f"@{ast.unparse(decorator)}" for decorator in node.decorator_list]
            text = ast.get_source_segment(source, node)
            found[node.name] = "\n".join([*decorators, text])
        elif isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = ast.get_source_segment(source, node)
    return found


@pytest.mark.parametrize("variant", DIFFERENT)
def test_shared_definitions_are_the_same_text(variant):
    reference = definitions(SCRIPT)
    other = definitions(ROOT / variant)
    different = {name for name in reference if other.get(name) != reference[name]}
    assert different == set(DIFFERENT[variant].split())
    assert len(reference) > 50


def packed(tree: ast.AST) -> list[int]:
    """The lines that hold several statements: calls in a tuple, values assigned in parallel, a
    conditional expression in the place of an `if`."""
    found = []
    for node in ast.walk(tree):
        value = getattr(node, "value", None)
        if isinstance(node, ast.Expr) and isinstance(value, ast.Tuple | ast.IfExp):
            found.append(node.lineno)
        elif isinstance(node, ast.Assign) and isinstance(value, ast.Tuple):
            found += [node.lineno for target in node.targets if isinstance(target, ast.Tuple)]
    return sorted(found)


GLOBS = ("*.py", "envs/*.py", "tools/*.py", "benchmark/**/*.py", "tests/**/*.py")
READ = sorted({str(path.relative_to(ROOT)) for glob in GLOBS for path in ROOT.glob(glob)})


@pytest.mark.parametrize("name", READ)
def test_there_is_one_statement_a_line(name):
    """I13"""
    lines = packed(ast.parse((ROOT / name).read_text()))
    assert not lines, f"{name}: several statements in lines {lines}"


# Lines at 100 columns and statements: what SPEC has as its aim, and a tenth.
SIZES = {
    "ppo_lstm_puffer.py": (1023, 819),
    "ppo_lstm_puffer_ddp.py": (1155, None),
    "ppo_lstm_puffer_xla.py": (1155, None),
    "protein_sweep.py": (605, 495),
}


@pytest.mark.parametrize("name", SIZES)
def test_scripts_keep_to_their_size(name):
    most_lines, most_statements = SIZES[name]
    ruff = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", "100", "-"]
    text = (ROOT / name).read_text()
    text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    # A comment or a string that is wider is counted as it would wrap.
    assert sum(max(1, -(-len(line) // 100)) for line in text.splitlines()) <= most_lines
    statements = sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))
    assert most_statements is None or statements <= most_statements
