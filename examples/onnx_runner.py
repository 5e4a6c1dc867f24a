"""Runs an exported agent with onnxruntime and numpy alone.

    python examples/onnx_runner.py agent.onnx [scene.npy]

The scene is uint8 pixels (height, width, channels) of the agent's image size; without one it is noise.
"""

import json
import sys

import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession(sys.argv[1])
agent = json.loads(session.get_modelmeta().custom_metadata_map["stam"])
(height, width), columns, places = agent["glimpse_size"], agent["columns"], agent["rows"] * agent["columns"]
random, shape = np.random.default_rng(0), (*agent["image_size"], agent["channels"])
scene = np.load(sys.argv[2]) if len(sys.argv) > 2 else random.integers(0, 256, shape, dtype=np.uint8)
assert scene.shape == shape, f"the scene must be {shape}, got {scene.shape}"

locations, glimpses, kept = [agent["first_location"]], [], {}
if agent["cache"]:  # a causal core carries what it keeps from step to step; another takes all glimpses again
    kept = {"seen": np.zeros((1, places), bool), "cache": np.zeros(agent["cache"], np.float32)}
while True:
    row, column = divmod(locations[-1], columns)
    pixels = scene[row * height : (row + 1) * height, column * width : (column + 1) * width] / 255
    glimpses.append(((pixels - agent["mean"]) / agent["std"]).transpose(2, 0, 1))
    new = slice(-1 if kept else 0, None)
    observed = {"glimpses": np.array([glimpses[new]], np.float32), "locations": np.array([locations[new]])}
    (probabilities,), (policy,), *carried = session.run(None, observed | kept)
    kept = dict(zip(kept, carried, strict=True))
    label, confidence = agent["labels"][probabilities.argmax()], probabilities.max()
    print(f"glimpse {len(locations):2} at ({row}, {column}): {label}, {confidence:.0%} sure")
    if confidence > agent["threshold"] or not policy.any():
        break
    locations.append(int(policy.argmax()))
