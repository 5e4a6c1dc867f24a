"""Bridges to other software: ONNX and Gymnasium."""
