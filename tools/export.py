"""Writes what a run has learned in another form, by the ending of --out.

    python tools/export.py runs/RUN --out policy.bin     # PufferLib's flat file, for its C programs: float32 parameters
    python tools/export.py runs/RUN --out policy.onnx    # for ONNX Runtime; needs: pip install onnxscript onnxruntime
    python tools/export.py weights.bin --env-id breakout --hidden-size 128 --out weights.pt      # for --load-weights

The ONNX file is the policy without sampling, in float32: observation (N, *obs), done (N), h, c (N, hidden) to logits
(N, logits), or the mean of a Gaussian, value (N), next_h and next_c. done is 1 where an episode ended just before this
observation: the state is reset there. Begin with zeros. It is compared with torch over some steps before it is written.
Flags that are not listed go to the training script: --env-id, --hidden-size, --env.KEY VALUE.
"""

import io
import logging
import os
import pathlib
import sys
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from common import Source, Trained, UsageError, main

INPUTS = ("observation", "done", "h", "c")


@dataclass
class Options(Source):
    out: str = ""
    """the file to write: .bin, .onnx or .pt"""


class Policy(torch.nn.Module):
    """The script's `act` without the sampling."""

    def __init__(self, trained: Trained):
        super().__init__()
        self.agent, self.act = trained.agent, trained.script.act
        self.agent.sample = lambda logits, noise: (logits, logits)

    def forward(self, observation, done, h, c):
        logits, _, value, h, c = self.act(
            self.agent, observation, done, h, c, *self.agent.lstm_weights(), None
        )
        return logits, value, h, c


@torch.no_grad()
def to_onnx(trained: Trained, out: pathlib.Path) -> tuple[bytes, str]:
    """The file and a line about it. Raises UsageError where a package is missing, AssertionError where it computes wrongly."""
    try:
        import onnxruntime
        import onnxscript  # noqa: F401  torch.onnx.export needs it
    except ImportError as error:
        raise UsageError(f"--out {out}: {error}; pip install onnxscript onnxruntime") from error
    logging.getLogger("torch.onnx").setLevel(
        logging.ERROR
    )  # it tells of torchvision, which is not used
    policy, space, n = Policy(trained).eval(), trained.envs.single_observation_space, 3
    space.seed(1)
    steps = [
        (torch.as_tensor(np.stack([space.sample() for _ in range(n)])), torch.zeros(n))
        for _ in range(8)
    ]
    steps[4][1][0] = 1  # a reset among them
    state = torch.zeros(2, n, trained.args.hidden_size).unbind()
    outputs = ("mean" if trained.agent.continuous else "logits", "value", "next_h", "next_c")
    with io.BytesIO() as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = {"input_names": INPUTS, "output_names": outputs}
        batch = {name: {0: torch.export.Dim("batch")} for name in INPUTS}
        torch.onnx.export(
            policy,
            (*steps[0], *state),
            file,
            **names,
            dynamic_shapes=batch,
            dynamo=True,
            verbose=False,
        )
        content = file.getvalue()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    difference, ours, theirs = 0.0, state, [x.numpy() for x in state]
    for observation, done in steps:
        logits, value, *ours = policy(observation, done, *ours)
        inputs = dict(zip(INPUTS, (observation.numpy(), done.numpy(), *theirs)))
        *heads, theirs[0], theirs[1] = session.run(None, inputs)
        pairs = zip((logits, value, *ours), (*heads, *theirs))
        difference = max(
            difference, *(float((one - torch.as_tensor(other)).abs().max()) for one, other in pairs)
        )
    assert difference < 1e-4, f"ONNX Runtime and torch differ by {difference:.1e}"
    shapes = f"observation (N, {', '.join(map(str, space.shape))}) {space.dtype}, state (N, {state[0].shape[1]})"
    return (
        content,
        f"{shapes}; differs from torch by at most {difference:.1e} over {len(steps)} steps",
    )


def export(options: Options, flags: list[str]) -> int:
    out = pathlib.Path(options.out)
    if out.suffix not in (".bin", ".onnx", ".pt"):
        raise UsageError(f"--out {options.out}: must end in .bin, .onnx or .pt")
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: no such folder")
    trained = Trained(options, [*flags, "--precision", "float32"])
    trained.make(1)
    parameters, line = list(trained.agent.parameters()), ""
    if out.suffix == ".onnx":
        content, line = to_onnx(trained, out)
    elif out.suffix == ".bin":
        content = torch.nn.utils.parameters_to_vector(parameters).detach().numpy().tobytes()
    else:
        buffer = io.BytesIO()
        torch.save(trained.agent.state_dict(), buffer)
        content = buffer.getvalue()
    trained.envs.close()
    temporary = out.with_name(f"{out.name}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, out)
    print(
        f"{out}: {sum(p.numel() for p in parameters):,} parameters of {trained.path}{line and '; '}{line}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(Options, export, __doc__))
