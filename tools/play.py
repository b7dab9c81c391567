"""Plays episodes with what a run has learned: statistics on stderr, one line of JSON on stdout.

    python tools/play.py                                             # latest: the newest run in runs/
    python tools/play.py runs/RUN --episodes 256 --deterministic     # the likeliest actions, not samples
    python tools/play.py runs/RUN --render                           # in a window
    python tools/play.py runs/RUN --deterministic --gif game.gif     # an episode as a picture, without a display
    python tools/play.py weights.bin --env-id breakout --hidden-size 128     # a lone .pt or .bin, PufferLib's too

RUN comes first. Flags that are not listed go to the training script: --seed, --num-envs, --env.KEY VALUE, --device, --precision.
A run is played by its own copy of the script, which is executed: name another one with --script if you do not trust it.
"""

import contextlib
import inspect
import itertools
import json
import os
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from common import Source, Trained, UsageError, main
from PIL import Image, ImageDraw, ImageFont


@dataclass
class Options(Source):
    episodes: int = 100
    """how many to play; each agent's first ones"""
    max_steps: int = 27_000
    """a longer episode is cut and counts as it stands: an agent may keep the ball for ever (the limit is Atari's)"""
    deterministic: bool = False
    """take the most likely action instead of sampling"""
    render: bool = False
    """show one environment in a window"""
    gif: str | None = None
    """write the best seconds of one episode to this file"""


@torch.no_grad()
def play(
    trained: Trained, options: Options, finished: list, film: "Film | None" = None, repeat: int = 1
):
    """Appends (return, length) of --episodes episodes to `finished`. The agent acts at every `repeat`-th step.

    They are each agent's first ones: taking whatever ends first would favour short episodes. An agent whose episode takes more than
    --max-steps plays no other.
    """
    script, args, envs, agent = trained.script, trained.args, trained.envs, trained.agent
    n, device = envs.num_agents, torch.device(args.device)
    quota = options.episodes // n + (np.arange(n) < options.episodes % n)
    counts = np.zeros(n, int)
    h, c = torch.zeros((2, n, args.hidden_size), device=device).unbind()
    weight, bias = agent.lstm_weights()
    envs.reset()
    for t in itertools.count():
        _, observations, rewards, dones, _ = envs.receive()
        for number, episodic_return, length in envs.episodes:
            if counts[number] < quota[number]:
                counts[number] += 1
                finished.append((episodic_return, length / repeat))
        envs.episodes.clear()
        too_long = (envs.lengths / repeat > options.max_steps) & (counts < quota)
        finished += zip(envs.returns[too_long].tolist(), (envs.lengths[too_long] / repeat).tolist())
        counts[too_long] = quota[too_long]
        # Some C environments log episodes without ever flagging an end.
        logged = sum(count for count, _ in envs.logs.get("n", ()))
        if (
            (counts >= quota).all()
            or (not finished and logged >= options.episodes)
            or (film and film.full)
        ):
            return
        if film:
            film.add(observations[0], rewards.sum())
        if t % repeat == 0:
            inputs = (torch.as_tensor(array, device=device) for array in (observations, dones))
            noise = agent.sampling_noise(n, device=device, deterministic=options.deterministic)
            actions, _, _, h, c = script.act(agent, *inputs, h, c, weight, bias, noise)
        if options.render:
            envs.vecenv.driver_env.render()
        envs.send(actions.cpu().numpy())


def statistics(data: np.ndarray) -> dict[str, float]:
    error = float(data.std(ddof=1) / len(data) ** 0.5) if len(data) > 1 else 0.0
    return {
        "mean": float(data.mean()),
        "min": float(data.min()),
        "max": float(data.max()),
        "standard_error": error,
    }


def run(options: Options, flags: list[str]) -> int:
    if options.episodes < 1:
        raise UsageError(f"--episodes {options.episodes}: must be at least 1")
    if options.max_steps < 1:
        raise UsageError(f"--max-steps {options.max_steps}: must be at least 1")
    if options.render and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        raise UsageError("--render: no display here; use xvfb-run, or leave --render out")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(
            1
        )  # products this small are six times slower where threads wait for each other
    trained = Trained(options, flags)
    film, repeat, finished, interrupted = None, 1, [], False
    if options.gif:
        options.episodes = 1
        film, repeat = make_film(trained, options.gif)
    elif options.render:
        make_rendered(trained, "human")
    else:
        trained.make(min(options.episodes, trained.args.num_envs))
    try:
        play(trained, options, finished, film, repeat)
    except KeyboardInterrupt:  # what was played counts
        interrupted = True
    trained.envs.close()
    result = {
        "checkpoint": str(trained.path),
        "env_id": trained.args.env_id,
        "seed": trained.args.seed,
    }
    result |= {"deterministic": options.deterministic, "episodes": len(finished)}
    for name, data in zip(
        ("episodic_return", "episodic_length"), np.array(finished, float).reshape(-1, 2).T
    ):
        if len(data):
            shown = result[name] = statistics(data)
            numbers = (
                f"{shown['mean']:.2f} ± {shown['standard_error']:.2f}",
                f"{shown['min']:g} to {shown['max']:g}",
            )
            print(
                f"{name}: {numbers[0]} (standard error), from {numbers[1]}, {len(data)} episodes",
                file=sys.stderr,
            )
    result["env"] = trained.envs.means()
    if film:
        print(film.save(options.gif), file=sys.stderr)
    print(json.dumps(result))
    return 130 if interrupted else 0


def make_rendered(trained: Trained, mode: str):
    """`trained.make` of one environment with this render_mode, or without where it takes none."""
    given = trained.args.env
    with contextlib.suppress(UsageError):
        trained.args.env = {"render_mode": mode} | given
        return trained.make(1)
    trained.args.env = given
    trained.make(1)


# --gif ----------------------------------------------------------------------------------------------------------------------

SECONDS, LONGEST = (
    12,
    60 * 600,
)  # shown; frames played: an agent may keep the ball for ever and hit nothing


class Film:
    """The seconds of an episode in which most reward comes in."""

    def __init__(self, shoot: Callable, draw: Callable, fps: float):
        """shoot(observation) takes a frame, draw(frame) makes a PIL image of one that is shown."""
        self.shoot, self.draw, self.fps = shoot, draw, fps
        self.window, self.best, self.score, self.frames = (
            deque(maxlen=round(SECONDS * fps) + 1),
            [],
            0.0,
            0,
        )

    @property
    def full(self) -> bool:
        return self.frames >= LONGEST

    def add(self, observation: np.ndarray, reward: float):
        self.score += reward
        self.frames += 1
        self.window.append((self.shoot(observation), self.score, self.frames / self.fps))
        if len(self.window) > len(self.best) or gain(self.window) > gain(self.best):
            self.best = list(self.window)

    def save(self, path: str) -> str:
        # A GIF counts in hundredths of a second, and viewers slow down those faster than 0.03 s.
        stride = max(1, round(self.fps / 33))
        images = [self.draw(frame) for frame, *_ in self.best[::stride]]
        some = [np.asarray(image) for image in images[:: -(-len(images) // 8)]]
        palette = Image.fromarray(np.concatenate(some)).quantize(
            128
        )  # for all: what does not move is stored once
        images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
        duration = max(30, round(100 * stride / self.fps) * 10)
        try:
            images[0].save(
                path, "GIF", save_all=True, append_images=images[1:], duration=duration, loop=0
            )
        except OSError as error:
            raise UsageError(f"--gif {path}: cannot be written ({error})") from error
        return f"{path}: from second {self.best[0][2]:.0f} of {self.frames / self.fps:.0f}"


def gain(frames) -> float:
    return frames[-1][1] - frames[0][1]


def make_film(trained: Trained, path: str) -> tuple[Film, int]:
    """Makes one environment and a film of it; and after how many frames the agent acts."""
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise UsageError(f"--gif {path}: no such folder")
    args = trained.args
    if args.env_id.removeprefix("puffer_") == "breakout":
        from pufferlib.ocean.breakout.breakout import Breakout

        game = {
            name: item.default for name, item in inspect.signature(Breakout).parameters.items()
        } | args.env
        args.env = args.env | {"frameskip": 1}  # frames between two actions are shown too
        trained.make(1)
        film = Film(np.copy, lambda frame: draw_breakout(frame, game), fps=60)
        return film, game["frameskip"]
    make_rendered(trained, "rgb_array")
    environment = trained.envs.vecenv.driver_env
    if environment is trained.envs.vecenv:  # a C environment: render() would open a window
        hint = (
            f"xvfb-run python tools/play.py {trained.path.parent} --render, and a screen recorder"
        )
        raise UsageError(f"--gif {path}: {args.env_id} draws in a window only; use {hint}")

    def shoot(_):
        try:
            image = Image.fromarray(environment.render()).convert("RGB")
        except Exception as error:  # a package that is missing, no array
            why = f"{type(error).__name__}: {error}"
            raise UsageError(f"--gif {path}: {args.env_id} draws no rgb_array ({why})") from error
        image.thumbnail((384, 384))  # hundreds of them are kept
        return image

    metadata = getattr(getattr(environment.env, "unwrapped", None), "metadata", {})
    return Film(shoot, lambda image: image, fps=metadata.get("render_fps", 30)), 1


# Breakout, drawn from the observation: it holds the paddle, the ball, every brick, the score and the balls left.
BRICKS_FROM_TOP, BALLS, MOST_POINTS, WIDEST_PADDLE = 50, 5, 864, 62  # PufferLib's breakout.h
BACKGROUND, PADDLE, WHITE = (6, 24, 24), (0, 255, 255), (255, 255, 255)
ROWS = ((230, 41, 55), (255, 161, 0), (253, 249, 0), (0, 228, 48), (102, 191, 255), (0, 121, 241))
SCALE = 2 / 3  # of the game's 576 x 330 pixels
DETAIL = 4  # a picture is drawn this many times larger than it is stored, and reduced: smooth edges


def draw_breakout(observation: np.ndarray, game: dict) -> Image.Image:
    """A frame. game: the arguments that the environment was made with (sizes in pixels of the game)."""
    zoom = SCALE * DETAIL
    size = round(game["width"] * SCALE) * DETAIL, round(game["height"] * SCALE) * DETAIL
    image = Image.new("RGB", size, BACKGROUND)
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(20 * zoom)

    def box(x: float, y: float, width: float, height: float) -> list[int]:
        return [
            round(x * zoom),
            round(y * zoom),
            round((x + width) * zoom) - 1,
            round((y + height) * zoom) - 1,
        ]

    columns, gap = game["brick_cols"], 1 / SCALE  # a gap of a stored pixel
    for brick in np.flatnonzero(observation[10:] == 0):
        x, y = (
            brick % columns * game["brick_width"],
            brick // columns * game["brick_height"] + BRICKS_FROM_TOP,
        )
        pen.rectangle(
            box(x, y, game["brick_width"] - gap, game["brick_height"] - gap),
            ROWS[brick // columns % len(ROWS)],
        )
    x, y = observation[:4].reshape(2, 2).T * [
        [game["width"]],
        [game["height"]],
    ]  # of paddle and ball
    pen.rectangle(box(x[0], y[0], observation[9] * WIDEST_PADDLE, game["paddle_height"]), PADDLE)
    pen.ellipse(box(x[1], y[1], game["ball_width"], game["ball_height"]), WHITE)
    pen.text((10 * zoom, 8 * zoom), f"score {round(observation[7] * MOST_POINTS)}", WHITE, font)
    balls = f"balls {round(observation[8] * BALLS)}"
    pen.text(((game["width"] - 10) * zoom, 8 * zoom), balls, WHITE, font, anchor="ra")
    return image.reduce(DETAIL)


if __name__ == "__main__":
    sys.exit(main(Options, run, __doc__))
