"""Plays episodes with what a run has learned: statistics on stderr, one line of JSON on stdout.

    python tools/play.py                                         # latest: the newest run in runs/
    python tools/play.py runs/RUN --episodes 256 --deterministic # the likeliest actions, no samples
    python tools/play.py runs/RUN --render                       # in a window
    python tools/play.py runs/RUN --gif game.gif                 # a picture, without a display
    python tools/play.py weights.bin --env-id breakout --hidden-size 128     # PufferLib's, or a .pt

RUN comes first. Flags that are not listed go to the training script: --seed, --num-envs,
--env.KEY VALUE, --device, --precision. A run is played by its own copy of the script, which is
executed: name another one with --script if you do not trust it. No environment of training is
played in. `env` in the JSON is what environments log, also of games beyond --episodes.
"""

import contextlib
import ctypes
import inspect
import io
import itertools
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from pufferlib import adapters
from run_folder import Source, Trained, fail, main


@dataclass
class Options(Source):
    episodes: int = 100
    """how many to play, each agent's first ones; rounded up to whole games of all agents in one"""
    max_steps: int = 27_000
    """an episode that comes so far is cut and counts as it stands: it may never end (the limit is Atari's)"""
    deterministic: bool = False
    """take the most likely action instead of sampling"""
    render: bool = False
    """show one environment in a window"""
    gif: str | None = None
    """write the best seconds of one episode to this file"""


@torch.no_grad()
def play(
    trained: Trained,
    options: Options,
    finished: list,
    num_envs: int = 1,
    film: "Film | None" = None,
    repeat: int = 1,
):
    """Appends (return, length, whether it was cut) of --episodes episodes to `finished`.

    They are each agent's first ones: taking whatever ends first would favour short episodes. The
    environments share out rounds; in one each agent plays an episode. Once those that came have
    played theirs, nobody waits for the others. An agent whose episode takes --max-steps plays no
    other. It acts at every `repeat`-th step.
    """
    args = trained.args
    envs = trained.envs
    agent = trained.agent
    n = envs.num_agents
    num_envs = math.gcd(num_envs, n)  # a PufferEnv of one's own may make another number
    rounds = -(-options.episodes * num_envs // n)
    quota = rounds // num_envs + (np.arange(num_envs) < rounds % num_envs)
    quota = quota.repeat(n // num_envs)
    counts = np.zeros(n, int)
    came = np.zeros(n, bool)
    idle = np.zeros(n)  # steps since the agent was last there
    h, c = torch.zeros((2, n, args.hidden_size), device=args.device)
    weight, bias = agent.lstm_weights()
    began = time.monotonic()
    patience = adapters.PATIENCE
    envs.reset()
    for t in itertools.count():
        _, observations, rewards, dones, _ = envs.receive()
        for number, episodic_return, length in envs.episodes:
            if counts[number] < quota[number]:
                counts[number] += 1
                finished.append((episodic_return, length / repeat, False))
        envs.episodes.clear()
        too_long = (envs.lengths / repeat >= options.max_steps) & (counts < quota)
        lengths = envs.lengths[too_long] / repeat
        finished += zip(envs.returns[too_long].tolist(), lengths.tolist(), itertools.repeat(True))
        counts[too_long] = quota[too_long]
        idle = np.where(envs.ended, idle + 1, 0)
        counts[idle / repeat > options.max_steps] = options.episodes  # it comes no more
        came |= ~envs.ended
        done = (counts >= quota).reshape(num_envs, -1)
        awaited = came.reshape(num_envs, -1) & ~done
        over = done.any(1) & ~awaited.any(1)
        # Some C environments log episodes without ever flagging an end.
        counted = () if envs.next_step_reset else envs.logs.get("n", ())
        logged = sum(count for count, _ in counted)
        enough = over.all() or (not finished and logged >= options.episodes)
        if enough or (film and film.full):
            return
        seconds = time.monotonic() - began
        if seconds > patience:
            played = len(finished) or round(logged)
            text = f"episodes: {played} of {quota.sum()} after {t // repeat} steps"
            print(f"{text}, {seconds:.0f} s", file=sys.stderr)
            patience = 2 * seconds
        if film:
            film.add(observations[0], rewards.sum())
        if t % repeat == 0:
            inputs = (torch.as_tensor(array, device=args.device) for array in (observations, dones))
            noise = agent.sampling_noise(n, device=args.device)
            if options.deterministic:  # the Gaussian's mean, or the same noise for all choices
                noise.fill_(0 if agent.continuous else 1)
            actions, _, _, h, c = trained.script.act(agent, *inputs, h, c, weight, bias, noise)
        if options.render:
            envs.vecenv.driver_env.render()
        envs.send(actions.cpu().numpy())


def statistics(data: np.ndarray) -> dict[str, float]:
    error = data.std(ddof=1) / len(data) ** 0.5 if len(data) > 1 else 0.0
    return {
        "mean": float(data.mean()),
        "min": float(data.min()),
        "max": float(data.max()),
        "standard_error": float(error),
    }


@contextlib.contextmanager
def stdout_for_json():
    """What environments print, and programs that they start, goes to stderr."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if sys.__stdout__:  # None where it was closed
            sys.__stdout__.flush()
        ctypes.CDLL(None).fflush(None)  # what C code has printed
        os.dup2(stdout, 1)
        os.close(stdout)


def run(options: Options, flags: list[str]) -> int:
    for name in "episodes", "max_steps":
        if getattr(options, name) < 1:
            fail(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 1")
    if options.render and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        fail("--render: no display here; use xvfb-run, or leave --render out")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # for products this small threads take six times as long
    with stdout_for_json():
        trained, finished, film, code = play_episodes(options, flags)
    if 0 < len(finished) < options.episodes and code == 0:
        fewer = f"{len(finished)} of {options.episodes} episodes"
        why = f"an agent that did not come, or was cut at --max-steps {options.max_steps}"
        print(f"{fewer}: {why}, plays no other", file=sys.stderr)
    cut = sum(was_cut for *_, was_cut in finished)
    if cut:
        text = f"{cut} of {len(finished)} episodes were cut at --max-steps {options.max_steps}"
        print(f"{text}, and count as they stood", file=sys.stderr)
    result = {
        "checkpoint": str(trained.path),
        "env_id": trained.args.env_id,
        "seed": trained.args.seed,
        "deterministic": options.deterministic,
        "episodes": len(finished),
        "cut": cut,
    }
    names = ("episodic_return", "episodic_length") if finished else ()
    for name, data in zip(names, np.array(finished).T):
        shown = statistics(data)
        result[name] = shown
        print(
            f"{name}: {shown['mean']:.2f} ± {shown['standard_error']:.2f} (standard error), "
            f"from {shown['min']:g} to {shown['max']:g}, {len(data)} episodes",
            file=sys.stderr,
        )
    result["env"] = {}
    for name, pairs in trained.envs.logs.items():
        values, weights = np.array(pairs, float).T
        result["env"][name] = np.average(values, weights=weights + 1e-9)
    print(json.dumps(result))
    if film:
        try:
            print(film.save(options.gif), file=sys.stderr)
        except OSError as error:
            fail(f"--gif {options.gif}: {error.strerror}")
    return code


def play_episodes(options: Options, flags: list[str]):
    """What played, what `play` says of its episodes, the film if there is one, the exit code."""
    trained = Trained(options, flags)
    film = None
    repeat = 1
    num_envs = 1
    if options.gif:
        options.gif = os.path.abspath(options.gif)  # environments may change the folder
        options.episodes = 1
        film, repeat = make_film(trained, options.gif)
    elif options.render:
        failed = make_rendered(trained, "human")
        if failed:
            print(f"--render: perhaps no window: {failed}", file=sys.stderr)
    else:
        num_envs = min(options.episodes, trained.args.num_envs)
        trained.make(num_envs)
        enough = -(-options.episodes * num_envs // trained.envs.num_agents)
        if enough < num_envs and not trained.args.num_workers:  # several agents in each
            num_envs = enough
            trained.envs.close()
            said = io.StringIO()  # again
            try:
                with contextlib.redirect_stderr(said):
                    trained.make(num_envs)
            except SystemExit:
                print(said.getvalue(), file=sys.stderr)
                raise
    finished = []
    code = 0
    try:
        play(trained, options, finished, num_envs, film, repeat)
    except KeyboardInterrupt:  # what was played counts
        code = 130
    trained.envs.close()
    return trained, finished, film, code


def make_rendered(trained: Trained, mode: str) -> str:
    """`trained.make` of one environment with this render_mode, or as the run had it where that
    fails. Returns what went wrong, or "" where the environment takes none."""
    given = trained.args.env
    trained.args.env = given | {"render_mode": mode}
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            trained.make(1)
        return ""
    except SystemExit:  # a refusal
        failed = said.getvalue().strip().rpartition("\n")[2]
        failed = "" if "render_mode" in failed else failed
    except Exception as error:
        failed = repr(error)
    trained.args.env = given
    trained.make(1)
    return failed


# --gif --------------------------------------------------------------------------------------------

SECONDS = 12  # shown
LONGEST = 60 * 600  # frames played: an agent may keep the ball for ever and hit nothing


class Film:
    """The seconds of an episode in which most reward comes in."""

    def __init__(self, shoot: Callable, draw: Callable, fps: float):
        """shoot(observation) takes a frame, draw(frame) makes a PIL image of one that is shown."""
        self.shoot = shoot
        self.draw = draw
        self.fps = fps
        self.window = deque(maxlen=round(SECONDS * fps) + 1)
        self.best = []
        self.score = 0.0
        self.frames = 0

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
        corner = max(image.width for image in images), max(image.height for image in images)
        images = [image.crop((0, 0, *corner)) for image in images]  # a smaller one gets a margin
        some = [np.asarray(image) for image in images[:: -(-len(images) // 8)]]
        # One palette for all: what does not move is stored once.
        palette = Image.fromarray(np.concatenate(some)).quantize(128)
        images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
        shown = {"duration": max(30, round(100 * stride / self.fps) * 10), "loop": 0}
        images[0].save(path, "GIF", save_all=True, append_images=images[1:], **shown)
        return f"{path}: from second {self.best[0][2]:.0f} of {self.frames / self.fps:.0f}"


def gain(frames) -> float:
    return frames[-1][1] - frames[0][1]


def make_film(trained: Trained, path: str) -> tuple[Film, int]:
    """Makes one environment and a film of it; and after how many frames the agent acts."""
    if not path.lower().endswith(".gif"):
        fail(f"--gif {path}: must end in .gif")
    if not os.path.isdir(os.path.dirname(path) or "."):
        fail(f"--gif {path}: no such folder")
    args = trained.args
    if args.env_id.removeprefix("puffer_") == "breakout":
        from pufferlib.ocean.breakout.breakout import Breakout

        parameters = inspect.signature(Breakout).parameters
        game = {name: item.default for name, item in parameters.items()} | args.env
        args.env = args.env | {"frameskip": 1}  # frames between two actions are shown too
        trained.make(1)
        return Film(np.copy, lambda frame: draw_breakout(frame, game), fps=60), game["frameskip"]
    failed = make_rendered(trained, "rgb_array")
    environment = trained.envs.vecenv.driver_env
    if hasattr(environment, "c_envs"):  # PufferLib's name; C's render() would open a window
        hint = "xvfb-run python tools/play.py RUN --render, and a screen recorder"
        fail(f"--gif {path}: {args.env_id} draws in a window only; use {hint}")

    def shoot(_):
        try:
            image = Image.fromarray(environment.render()).convert("RGB")
        except Exception as error:  # a package that is missing, no array
            fail(f"--gif {path}: {args.env_id} draws no rgb_array ({failed or repr(error)})")
        image.thumbnail((384, 384))  # hundreds of them are kept
        return image

    painter = environment
    if isinstance(environment, adapters.AdaptedEnvs):
        painter = environment.envs[0]
    metadata = getattr(painter, "metadata", None) or {}
    return Film(shoot, lambda image: image, fps=metadata.get("render_fps") or 30), 1


# Breakout, drawn from the observation: paddle, ball, every brick, the score and the balls left.
BRICKS_FROM_TOP = 50  # this and the next three are of PufferLib's breakout.h
BALLS = 5
MOST_POINTS = 864
WIDEST_PADDLE = 62
BACKGROUND = (6, 24, 24)
PADDLE = (0, 255, 255)
WHITE = (255, 255, 255)
ROWS = ((230, 41, 55), (255, 161, 0), (253, 249, 0), (0, 228, 48), (102, 191, 255), (0, 121, 241))
SCALE = 2 / 3  # of the game's 576 x 330 pixels
DETAIL = 4  # drawn so many times larger than stored, and reduced: smooth edges


def draw_breakout(observation: np.ndarray, game: dict) -> Image.Image:
    """A frame. game: the environment's arguments (sizes in pixels of the game)."""
    zoom = SCALE * DETAIL
    width = round(game["width"] * SCALE) * DETAIL
    image = Image.new("RGB", (width, round(game["height"] * SCALE) * DETAIL), BACKGROUND)
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(20 * zoom)

    def box(x: float, y: float, width: float, height: float) -> list[int]:
        corners = (x, y), (x + width, y + height)
        (left, top), (right, bottom) = np.rint(np.array(corners) * zoom).astype(int).tolist()
        return [left, top, right - 1, bottom - 1]

    gap = 1 / SCALE  # a stored pixel
    for brick in np.flatnonzero(observation[10:] == 0):
        row, column = divmod(int(brick), game["brick_cols"])
        x = column * game["brick_width"]
        y = row * game["brick_height"] + BRICKS_FROM_TOP
        place = box(x, y, game["brick_width"] - gap, game["brick_height"] - gap)
        pen.rectangle(place, ROWS[row % len(ROWS)])
    paddle_x, paddle_y, ball_x, ball_y = observation[:4] * ([game["width"], game["height"]] * 2)
    paddle_width = observation[9] * WIDEST_PADDLE
    pen.rectangle(box(paddle_x, paddle_y, paddle_width, game["paddle_height"]), PADDLE)
    pen.ellipse(box(ball_x, ball_y, game["ball_width"], game["ball_height"]), WHITE)
    pen.text((10 * zoom, 8 * zoom), f"score {round(observation[7] * MOST_POINTS)}", WHITE, font)
    balls = f"balls {round(observation[8] * BALLS)}"
    pen.text(((game["width"] - 10) * zoom, 8 * zoom), balls, WHITE, font, anchor="ra")
    return image.reduce(DETAIL)


if __name__ == "__main__":
    sys.exit(main(run, Options, __doc__))
