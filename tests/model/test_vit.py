import pytest
import torch
from agents import randomise
from naive import encode

import stam
from stam.model.vit import VisionTransformer


def small_vit(**settings) -> VisionTransformer:
    defaults = dict(num_classes=4, patch_size=(4, 6), image_patches=(3, 2), width=24, depth=3, num_heads=3)
    vit = VisionTransformer(**(defaults | settings))
    randomise(vit)
    return vit.eval()


@pytest.mark.parametrize("distilled", [True, False])
def test_whole_image_equals_the_encoder_written_out(distilled):
    vit = small_vit(distilled=distilled)
    image = torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        got = vit.classify_images(image)
        for b in range(2):
            patches = [image[b, :, y : y + 4, x : x + 6].reshape(-1) for y in (0, 4, 8) for x in (0, 6)]
            features = encode(vit.state_dict(), 3, patches, range(6), prefix_tokens=vit.num_readout)
            want = vit.classify(features[None])
            for ours, theirs in zip(got, want, strict=True):
                torch.testing.assert_close(ours[b], theirs[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_all_glimpses_in_any_order_equal_the_whole_image_deit(size):
    agent = stam.Agent(stam.AgentConfig.of_size(size, 10, actor_width=8)).eval()
    image = torch.randn(1, 3, 224, 224)
    order = torch.randperm(49)[None]
    patches = agent.grid.patches(agent.grid.cut(image, order))
    with torch.no_grad():
        features = agent.core(patches, agent.positions[order].flatten(1))
        whole = agent.core.classify_images(image)
        for got, want in zip(agent.core.classify(features), whole, strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_each_sample_has_its_own_subset():
    vit = small_vit()
    patches = torch.randn(2, 3, 72)
    positions = torch.tensor([[5, 0, 2], [1, 4, 3]])
    with torch.no_grad():
        together = vit(patches, positions)
        alone = torch.cat([vit(patches[b : b + 1], positions[b : b + 1]) for b in range(2)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_only_the_patches_given_are_embedded():
    vit = small_vit()
    embedded = []
    vit.patch_embed.register_forward_hook(lambda module, args, out: embedded.append(out.shape[1]))
    vit(torch.randn(1, 2, 72), torch.tensor([[0, 5]]))
    assert embedded == [2]


def test_drop_path_masks_rise_over_depth_and_can_be_reused():
    vit = small_vit(depth=5, drop_path=0.4).train()
    masks = vit.sample_drop_path(4000, torch.Generator().manual_seed(0))
    assert masks.shape == (5, 2, 4000, 1, 1)
    dropped = (masks == 0).float().mean(dim=(1, 2, 3, 4))
    torch.testing.assert_close(dropped, torch.linspace(0, 0.4, 5), atol=0.02, rtol=0)
    torch.testing.assert_close(masks.mean(dim=(1, 2, 3, 4)), torch.ones(5), atol=0.05, rtol=0)
    patches, positions = torch.randn(4000, 1, 72)[:8], torch.zeros(8, 1, dtype=torch.long)
    first, second = (vit(patches, positions, masks[:, :, :8]) for _ in range(2))
    assert first.equal(second)
    assert not first.equal(vit(patches, positions))


def test_no_masks_outside_training_or_at_rate_zero():
    assert small_vit(drop_path=0.4).sample_drop_path(2) is None
    assert small_vit().train().sample_drop_path(2) is None


def test_the_core_can_be_exported(agent):
    patches, positions = torch.randn(2, 8, 48), torch.arange(8).expand(2, -1)
    tokens = torch.export.Dim("tokens", min=2, max=48)
    program = torch.export.export(
        agent.core, (patches, positions), dynamic_shapes=({1: tokens}, {1: tokens}), strict=False
    )
    more = torch.randn(2, 20, 48), torch.arange(20).expand(2, -1)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(*more), agent.core(*more))


def test_every_module_is_called_and_returns_what_its_name_says(agent):
    shapes = {}
    for name, part in agent.core.named_modules():
        part.register_forward_hook(lambda _, given, result, name=name: shapes.update({name: result.shape}))
    agent.core(torch.randn(2, 8, 48), torch.arange(8).expand(2, -1))
    assert shapes["blocks.0.attn.qkv"] == (2, 10, 72)
    assert shapes["blocks.0.attn"] == shapes["blocks.0.mlp"] == shapes["blocks.0"] == (2, 10, 24)
    assert shapes["blocks.1"] == shapes[""] == (2, 2, 24)  # after the last block two tokens are read
    unused = {"head", "head_dist", "patch_embed.proj", "blocks"}
    assert {name for name, _ in agent.core.named_modules()} - set(shapes) == unused
