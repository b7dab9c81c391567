"""Writes what a run has learned in another form, by the ending of --out.

    python tools/export.py runs/RUN --out policy.onnx    # for ONNX Runtime
    python tools/export.py runs/RUN --out policy.bin     # PufferLib's flat file, for its C programs
    python tools/export.py runs/RUN --out policy.pt      # PufferLib's weights, for PuffeRL

The ONNX file is the policy without sampling, in float32: observation (N, *obs), done (N), h, c
(N, hidden) to logits (N, logits), or the mean of a Gaussian, value (N), next_h and next_c. done is
1 where an episode ended just before this observation: the state is reset there. Begin with zeros.
It is compared with torch over some steps before it is written. RUN is a file of weights too, with
flags for the training script: --env-id, --hidden-size, --env.KEY VALUE.
"""

import io
import logging
import pathlib
import sys
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from pufferlib import adapters
from run_folder import Source, Trained, fail, main

INPUTS = ("observation", "done", "h", "c")


@dataclass
class Options(Source):
    out: str = ""
    """the file to write: .onnx, .bin or .pt"""


class Policy(torch.nn.Module):
    """The script's `act` without the sampling."""

    def __init__(self, trained: Trained):
        super().__init__()
        self.agent = trained.agent
        self.agent.sample = lambda logits, noise: (logits, logits)
        self.act = trained.script.act

    def forward(self, observation, done, h, c):
        weights = self.agent.lstm_weights()
        logits, _, value, h, c = self.act(self.agent, observation, done, h, c, *weights, None)
        return logits, value, h, c


@torch.no_grad()
def to_onnx(trained: Trained) -> tuple[bytes, str]:
    """The file and a line about it. Ends where it computes wrongly."""
    import onnxruntime

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it tells of torchvision, not used
    policy = Policy(trained).eval()
    space = trained.envs.observation_space
    space.seed(1)
    n = 3
    steps = []
    for _ in range(8):
        observations = np.stack([space.sample() for _ in range(n)])
        if observations.dtype.kind == "f":  # a bound may be as large as float32 goes
            observations = observations.clip(-10, 10)
        steps.append((torch.as_tensor(observations), torch.zeros(n)))
    steps[4][1][0] = 1  # a reset among them
    state = list(torch.zeros(2, n, trained.args.hidden_size))
    heads = "mean" if trained.agent.continuous else "logits", "value"
    names = {"input_names": INPUTS, "output_names": (*heads, "next_h", "next_c")}
    shapes = {name: {0: torch.export.Dim("batch")} for name in INPUTS}
    options = {"dynamic_shapes": shapes, "dynamo": True, "verbose": False}
    with io.BytesIO() as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(policy, (*steps[0], *state), file, **names, **options)
        content = file.getvalue()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    alone = [x[:1].numpy() for x in (*steps[0], *state)]
    try:
        session.run(None, dict(zip(INPUTS, alone)))
    except Exception as error:  # a len() of a tensor, in the script's Agent
        text = "x.shape[0] for len(x) in its flatten, or --script ppo_lstm_puffer.py, mends it"
        fail(f"the script's network is exported for a batch of {n} alone: {text} ({error!r:.200})")
    difference = 0.0
    ours = state
    theirs = [x.numpy() for x in state]
    for observation, done in steps:
        expected = policy(observation, done, *ours)
        inputs = dict(zip(INPUTS, (observation.numpy(), done.numpy(), *theirs)))
        results = session.run(None, inputs)
        for one, other in zip(expected, results):
            difference = np.maximum(difference, np.abs(one.numpy() - other).max())  # sees NaN
        ours = expected[2:]
        theirs = results[2:]
    if not difference < 1e-4:
        fail(f"ONNX Runtime and torch differ by {difference:.1e}")
    shape = ", ".join(map(str, ("N", *space.shape)))
    line = f"observation ({shape}) {space.dtype}, state (N, {trained.args.hidden_size})"
    compared = f"differs from torch by at most {difference:.1e} in {len(steps)} steps"
    return content, f"; {line}; {compared}"


def to_pufferlib(trained: Trained) -> bytes:
    """The file that PuffeRL loads, in which the LSTM's parameters are a cell's too."""
    state = trained.agent.state_dict()
    state = {name: value for name, value in state.items() if not name.startswith("return_norm")}
    for name, parameter in trained.agent.lstm.named_parameters():
        state[f"cell.{name.removesuffix('_l0')}"] = parameter.detach()
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def export(options: Options, flags: list[str]) -> int:
    out = pathlib.Path(options.out)
    if out.suffix not in (".onnx", ".bin", ".pt"):
        fail(f"--out {options.out}: must end in .onnx, .bin or .pt")
    if not out.parent.is_dir():
        fail(f"--out {out}: no such folder")
    out = out.absolute()  # environments may change the folder
    trained = Trained(options, [*flags, "--precision", "float32"])
    trained.make(1)
    normalized = trained.args.norm_obs and not trained.agent.pixels
    if normalized and out.suffix != ".onnx":
        fail(f"--out {out}: PufferLib's files have no place for --norm-obs; use .onnx")
    parameters = list(trained.agent.parameters())
    line = ""
    if out.suffix == ".onnx":
        content, line = to_onnx(trained)
    elif out.suffix == ".bin":
        # Not parameters_to_vector: the convolutions' memory is in another order.
        content = b"".join(parameter.detach().numpy().tobytes() for parameter in parameters)
    else:
        content = to_pufferlib(trained)
    trained.envs.close()
    try:
        adapters.write_whole(out, content)
    except OSError as error:
        fail(f"--out {out}: {error.strerror}")
    total = sum(parameter.numel() for parameter in parameters)
    print(f"{out}: {total:,} parameters of {trained.path}{line}")
    return 0


if __name__ == "__main__":
    sys.exit(main(export, Options, __doc__))
