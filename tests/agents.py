"""Small agents for tests."""

import torch

import stam


def tiny_config(**settings) -> stam.AgentConfig:
    """A small agent on a non-square grid: 3x4 glimpses of 2x2 patches."""
    defaults = dict(
        num_classes=5,
        image_size=(24, 32),
        glimpse_size=8,
        patch_size=4,
        width=24,
        depth=2,
        num_heads=3,
        drop_path=0.0,
        actor_width=16,
        critic_width=8,
    )
    return stam.AgentConfig(**(defaults | settings))


def randomise(module: torch.nn.Module, seed: int = 0, scale: float = 0.3) -> None:
    """Gives every parameter and running statistic a value that a mistake would not survive."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
            if name.endswith("running_var"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
