"""Adds a trained agent to the package: half-precision weights, calibration and a recorded hash.

    python experiments/ship.py runs/imagenette/learned --name imagenette-tiny \
        --evaluation runs/imagenette/learned.json

Temperature and threshold come from the evaluation, which fits them on one half of the validation scenes. The
policy is the one they were fitted for. `--rehash` only records the hashes of the agents in the package.
"""

import argparse
import hashlib
import json
from pathlib import Path

from stam.evaluation import load_evaluation
from stam.weights import HASHES_FILE, MODEL_FILE, is_agent_folder, load, save_agent

ASSETS = Path(__file__).parent.parent / "src" / "stam" / "assets"
MOST_BYTES = 20_000_000


def record_hashes(assets: Path) -> dict[str, str]:
    folders = sorted(path for path in assets.iterdir() if is_agent_folder(path))
    hashes = {path.name: hashlib.sha256((path / MODEL_FILE).read_bytes()).hexdigest() for path in folders}
    (assets / HASHES_FILE).write_text(json.dumps(hashes, indent=2) + "\n")
    return hashes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("agent", nargs="?", help="a run or weights folder")
    parser.add_argument("--name")
    parser.add_argument("--evaluation", type=Path)
    parser.add_argument("--assets", type=Path, default=ASSETS)
    parser.add_argument("--rehash", action="store_true")
    arguments = parser.parse_args()
    if not arguments.rehash:
        agent = load(arguments.agent)
        found = load_evaluation(arguments.evaluation)
        agent.configure(
            temperature=found.calibration.temperature,
            threshold=found.early_exit.fit.threshold,
            policy=found.policy,
        )
        save_agent(agent, arguments.assets / arguments.name, half=True)
        size = (arguments.assets / arguments.name / MODEL_FILE).stat().st_size
        assert size <= MOST_BYTES, f"{size} bytes is too large for the package"
        print(f"{arguments.name}: {size / 1e6:.1f} MB, threshold {agent.threshold:.3f}")
    for name, digest in record_hashes(arguments.assets).items():
        print(f"{digest[:16]}  {name}")


if __name__ == "__main__":
    main()
