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
(height, width), columns = agent["glimpse_size"], agent["columns"]
random = np.random.default_rng(0)
shape = (*agent["image_size"], agent["channels"])
scene = np.load(sys.argv[2]) if len(sys.argv) > 2 else random.integers(0, 256, shape, dtype=np.uint8)
assert scene.shape == shape, f"the scene must be {shape}, got {scene.shape}"

locations, glimpses = [int(random.integers(agent["rows"] * columns))], []
while True:
    row, column = divmod(locations[-1], columns)
    pixels = scene[row * height : (row + 1) * height, column * width : (column + 1) * width] / 255
    glimpses.append(((pixels - agent["mean"]) / agent["std"]).transpose(2, 0, 1))
    observed = {"glimpses": np.array([glimpses], np.float32), "locations": np.array([locations])}
    probabilities, policy = (output[0] for output in session.run(None, observed))
    label, confidence = agent["labels"][probabilities.argmax()], probabilities.max()
    print(f"glimpse {len(locations):2} at ({row}, {column}): {label}, {confidence:.0%} sure")
    if confidence > agent["threshold"] or not policy.any():
        break
    locations.append(int(policy.argmax()))
