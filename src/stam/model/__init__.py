"""The method in plain PyTorch: encoder, agent, policies, the episode, the teacher."""
