"""Plays a game of Breakout with a trained agent, its most likely actions, and writes an animated GIF. Needs no display.

    make video                                                       # the newest Breakout run in runs/, to benchmark/reports/pictures/breakout.gif
    python benchmark/video.py runs/RUN --out game.gif                # this run; a model_*.pt or PufferLib's .bin too
    python benchmark/video.py runs/RUN --start 30 --seconds 20       # from the 30th second of the game on, instead of the best ones

What is drawn is the agent's own observation: it holds the paddle, the ball, every brick, the score and the balls left. PufferLib's
renderer shows the same, but in a window (`--evaluate RUN --render`), which a server, a container or CI does not have.
"""

import argparse
import inspect
import itertools
import pathlib
import sys
from collections.abc import Iterator

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import ppo_lstm_puffer as ppo

PICTURES = pathlib.Path(__file__).parent / "reports" / "pictures"
FRAMES_PER_SECOND, LONGEST = 60, 60 * 600  # of the game; an agent may keep the ball for ever and hit nothing
BRICKS_FROM_TOP, BALLS, MOST_POINTS, WIDEST_PADDLE = 50, 5, 864, 62  # PufferLib's breakout.h
BACKGROUND, PADDLE, WHITE = (6, 24, 24), (0, 255, 255), (255, 255, 255)
ROWS = ((230, 41, 55), (255, 161, 0), (253, 249, 0), (0, 228, 48), (102, 191, 255), (0, 121, 241))
SCALE = 2 / 3  # of the game's 576 x 330 pixels
DETAIL = 4  # a picture is drawn this many times larger than it is stored, and reduced: smooth edges


def play(args: ppo.Args) -> Iterator[np.ndarray]:
    """The observation of every frame of one game."""
    frameskip = args.env.get("frameskip", 4)
    args.env["frameskip"] = 1  # frames between two actions are shown too; the agent acts as often as it did in training
    envs = ppo.make_envs(args, args.seed, num_envs=1)
    ppo.seed_everything(args.seed)
    agent = ppo.Agent(envs.single_observation_space, envs.single_action_space, args.hidden_size, args.precision)
    path = args.evaluate
    if not path.endswith((".pt", ".bin")):
        path = f"{path}/{ppo.load_checkpoint(path, '--evaluate')['model_file']}"
    ppo.load_weights(agent, path, "--evaluate")
    h, c = torch.zeros((2, 1, args.hidden_size)).unbind()
    envs.reset()
    step = envs.receive()
    with torch.no_grad():
        weights = agent.lstm_weights()
        while True:
            inputs = torch.as_tensor(step.observations), torch.as_tensor(step.dones), h, c
            actions, _, _, h, c = ppo.policy_step(agent, *inputs, *weights, agent.sampling_noise(1, deterministic=True))
            for _ in range(frameskip):
                yield step.observations[0].copy()
                envs.send(actions.numpy())
                step = envs.receive()
                if step.dones[0]:
                    return


def draw(observation: np.ndarray, game: dict) -> Image.Image:
    """A frame. game: the arguments that the environment was made with (sizes in pixels of the game)."""
    zoom = SCALE * DETAIL
    image = Image.new("RGB", (round(game["width"] * SCALE) * DETAIL, round(game["height"] * SCALE) * DETAIL), BACKGROUND)
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(20 * zoom)

    def box(x: float, y: float, width: float, height: float) -> list[int]:
        return [round(x * zoom), round(y * zoom), round((x + width) * zoom) - 1, round((y + height) * zoom) - 1]

    columns, gap = game["brick_cols"], 1 / SCALE  # a gap of a stored pixel
    for brick in np.flatnonzero(observation[10:] == 0):
        x, y = brick % columns * game["brick_width"], brick // columns * game["brick_height"] + BRICKS_FROM_TOP
        pen.rectangle(box(x, y, game["brick_width"] - gap, game["brick_height"] - gap), ROWS[brick // columns % len(ROWS)])
    x, y = observation[:4].reshape(2, 2).T * [[game["width"]], [game["height"]]]  # of paddle and ball
    pen.rectangle(box(x[0], y[0], observation[9] * WIDEST_PADDLE, game["paddle_height"]), PADDLE)
    pen.ellipse(box(x[1], y[1], game["ball_width"], game["ball_height"]), WHITE)
    pen.text((10 * zoom, 8 * zoom), f"score {round(observation[7] * MOST_POINTS)}", WHITE, font)
    pen.text(((game["width"] - 10) * zoom, 8 * zoom), f"balls {round(observation[8] * BALLS)}", WHITE, font, anchor="ra")
    return image.reduce(DETAIL)


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", help="a run's folder, a .pt or a .bin; default: the newest Breakout run in runs/")
    parser.add_argument("--out", type=pathlib.Path, default=PICTURES / "breakout.gif")
    parser.add_argument("--start", type=float, help="second of the game to begin with; default: where it makes the most points")
    parser.add_argument("--seconds", type=float, default=12, help="of the game to show")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    runs = sorted(pathlib.Path("runs").glob("breakout__*/trainer_state.pt"), key=lambda path: path.stat().st_mtime)
    if not options.run and not runs:
        parser.error("no Breakout run in runs/; `make train` makes one, or name a run or a checkpoint")
    try:
        run = options.run or str(runs[-1].parent)
        args, _ = ppo.parse_args(["--evaluate", run, "--device", "cpu", "--seed", str(options.seed)])
        if args.env_id.removeprefix("puffer_") != "breakout":
            parser.error(f"{args.evaluate} was trained on {args.env_id}; only Breakout can be drawn")
        parameters = inspect.signature(ppo.environment_class("breakout")).parameters
        game = {name: parameter.default for name, parameter in parameters.items()} | args.env
        frames = list(itertools.islice(play(args), LONGEST))
    except ppo.UsageError as error:
        parser.error(str(error))
    scores, span = [round(frame[7] * MOST_POINTS) for frame in frames], round(options.seconds * FRAMES_PER_SECOND)
    gains = np.subtract(scores[span:], scores[:-span]) if len(scores) > span else [0]
    start = int(np.argmax(gains)) if options.start is None else round(options.start * FRAMES_PER_SECOND)
    # Every second frame, 0.03 s each: a GIF counts in hundredths of a second, so it runs a tenth faster than the game.
    images = [draw(frame, game) for frame in frames[start : start + span : 2]]
    if not images:
        parser.error(f"--start {options.start:g}: the game ended after {len(frames) / FRAMES_PER_SECOND:.0f} s")
    palette = draw(frames[0], game).quantize(128)  # one for all frames: what does not move is not stored again
    images = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    images[0].save(options.out, save_all=True, append_images=images[1:], duration=30, loop=0)
    seconds = [frame / FRAMES_PER_SECOND for frame in (start, len(frames))]
    print(f"{options.out}: from second {seconds[0]:.0f} of {seconds[1]:.0f}; {scores[-1]} points before the game's last frame")


if __name__ == "__main__":
    main()
