"""A DeiT/ViT encoder over any subset of an image's patches; parameters are named as in timm."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stam.model.randomness import Randomness, random_source
from stam.shapes import Bool, Float, Int

# Given the keys and values of new tokens, returns those to attend to, as a KV cache does.
Extend = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class PatchEmbed(nn.Module):
    """Projects flat patches; the weight is stored as a convolution's, so that DeiT checkpoints load."""

    def __init__(self, patch_size: tuple[int, int], channels: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, kernel_size=patch_size, stride=patch_size)

    def forward(self, patches: Float[Tensor, "batch tokens pixels"]) -> Float[Tensor, "batch tokens width"]:
        """Embeds patches flattened as (channel, row, column)."""
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(
        self,
        x: Float[Tensor, "batch tokens width"],
        num_queries: int | None = None,
        mask: Bool[Tensor, "#batch 1 #tokens keys"] | None = None,
        extend: Extend | None = None,
    ) -> Float[Tensor, "batch queries width"]:
        """Attends from the first `num_queries` tokens (all of them by default) to every token.

        Args:
            x: Tokens.
            num_queries: Tokens that somebody reads afterwards.
            mask: Where a token may see a key; everywhere by default.
            extend: Gives the keys and values to attend to, where they are not those of the tokens alone.
        """
        qkv = self.qkv(x).unflatten(2, (3, self.num_heads, -1))  # (B, n, 3, heads, d)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()  # each (B, heads, n, d)
        if extend is not None:
            key, value = extend(key, value)
        if mask is not None:
            mask = mask[:, :, :num_queries]
        mixed = F.scaled_dot_product_attention(query[:, :, :num_queries], key, value, mask)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """The MLP of a transformer block."""

    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden_width)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_width, width)

    def forward(self, x: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens width"]:
        """Applies both layers to each token."""
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, num_heads: int, mlp_ratio: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = Mlp(width, int(width * mlp_ratio))

    def forward(
        self,
        x: Float[Tensor, "batch tokens width"],
        drop_masks: Float[Tensor, "2 batch 1 1"] | None = None,
        num_queries: int | None = None,
        mask: Bool[Tensor, "#batch 1 #tokens keys"] | None = None,
        extend: Extend | None = None,
    ) -> Float[Tensor, "batch queries width"]:
        """Returns the first `num_queries` tokens after the block, all of them by default.

        Args:
            x: Tokens.
            drop_masks: Drop-path factors of the two residual branches for each sample: 0, or 1 / (1 - rate).
            num_queries: Tokens that somebody reads after the block.
            mask: Where a token may see a key; everywhere by default.
            extend: Gives the keys and values to attend to, where they are not those of the tokens alone.
        """
        attention_scale, mlp_scale = (None, None) if drop_masks is None else drop_masks.unbind()
        attended = self.attn(self.norm1(x), num_queries, mask, extend)
        x = x[:, :num_queries] + drop_scaled(attended, attention_scale)
        return x + drop_scaled(self.mlp(self.norm2(x)), mlp_scale)


def drop_scaled(
    branch: Float[Tensor, "batch tokens width"], scale: Float[Tensor, "batch 1 1"] | None
) -> Tensor:
    """Returns a residual branch times its drop-path factor, if there is one."""
    return branch if scale is None else branch * scale


class VisionTransformer(nn.Module):
    """DeiT, plain (class token) or distilled (class and distillation token), with its classifiers.

    It encodes any subset of patches, a different one for each sample: every patch carries the position
    embedding of its place in the whole image, and only the patches given are embedded. The class and the
    distillation token are the read-out tokens. The last block is computed for them alone, since nothing
    reads the others.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        patch_size: tuple[int, int],
        image_patches: tuple[int, int],
        channels: int = 3,
        width: int = 384,
        depth: int = 12,
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        drop_path: float = 0.0,
        distilled: bool = True,
    ) -> None:
        super().__init__()
        self.patch_size, self.image_patches, self.channels = patch_size, image_patches, channels
        self.distilled = distilled
        self.num_readout = 2 if distilled else 1
        num_patches = image_patches[0] * image_patches[1]
        self.patch_embed = PatchEmbed(patch_size, channels, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        if distilled:
            self.dist_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, self.num_readout + num_patches, width))
        self.blocks = nn.ModuleList(Block(width, num_heads, mlp_ratio) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, num_classes)
        if distilled:
            self.head_dist = nn.Linear(width, num_classes)
        rates = torch.linspace(0, drop_path, depth) if drop_path > 0 else torch.zeros(depth)
        self.register_buffer("drop_path_rates", rates, persistent=False)
        self.drop_path = drop_path
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" not in name:
                nn.init.trunc_normal_(parameter, std=0.02)

    def sample_drop_path(
        self, batch_size: int, generator: Randomness = None
    ) -> Float[Tensor, "depth 2 batch 1 1"] | None:
        """Draws which residual branches to drop for each sample; `None` where nothing is dropped.

        The masks are returned, not kept: the pass that looks ahead to the next glimpse uses the same ones.
        """
        if not self.training or self.drop_path == 0:
            return None
        rates = self.get_buffer("drop_path_rates")
        keep = (1 - rates).view(-1, 1, 1, 1, 1)
        shape = (len(rates), 2, batch_size, 1, 1)
        noise = random_source(generator).uniform(shape, rates.device, batch_dim=2)
        return (noise < keep) / keep

    def forward(
        self,
        patches: Float[Tensor, "batch patches pixels"],
        positions: Int[Tensor, "batch patches"],
        drop_masks: Float[Tensor, "depth 2 batch 1 1"] | None = None,
    ) -> Float[Tensor, "batch readout width"]:
        """Encodes patches and returns the normalised features of the read-out tokens."""
        readout = self.readout_tokens().expand(patches.shape[0], -1, -1)
        x = torch.cat((readout, self.embed(patches, positions)), dim=1)  # (B, R + P, D)
        return self.encode(x, self.num_readout, drop_masks)

    def encode(
        self,
        x: Float[Tensor, "batch tokens width"],
        num_queries: int,
        drop_masks: Float[Tensor, "depth 2 batch 1 1"] | None = None,
        mask: Bool[Tensor, "#batch 1 #tokens keys"] | None = None,
        extend: Sequence[Extend] | None = None,
    ) -> Float[Tensor, "batch queries width"]:
        """Takes tokens through all blocks and returns the first `num_queries`, normalised."""
        for index, block in enumerate(self.blocks):
            masks = None if drop_masks is None else drop_masks[index]
            is_last = index == len(self.blocks) - 1
            own = None if extend is None else extend[index]
            x = block(x, masks, num_queries if is_last else None, mask, own)
        return self.norm(x)

    def readout_tokens(self) -> Float[Tensor, "1 readout width"]:
        """Returns the tokens that are read out: the class token and, if distilled, the distillation token."""
        tokens = torch.cat((self.cls_token, self.dist_token), 1) if self.distilled else self.cls_token
        return tokens + self.pos_embed[:, : self.num_readout]

    def embed(
        self, patches: Float[Tensor, "batch patches pixels"], positions: Int[Tensor, "batch patches"]
    ) -> Float[Tensor, "batch patches width"]:
        """Returns patch tokens: each patch's projection plus the embedding of its position."""
        return self.patch_embed(patches) + F.embedding(positions, self.pos_embed[0, self.num_readout :])

    def classify(
        self, features: Float[Tensor, "batch readout width"]
    ) -> tuple[Float[Tensor, "batch classes"], ...]:
        """Returns the logits of the class token and, if distilled, of the distillation token."""
        logits = self.head(features[:, 0])
        return (logits, self.head_dist(features[:, 1])) if self.distilled else (logits,)

    def all_patches(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> tuple[Float[Tensor, "batch patches pixels"], Int[Tensor, "batch patches"]]:
        """Cuts whole images into all of their patches; returns those and their positions."""
        (rows, columns), (height, width) = self.image_patches, self.patch_size
        batch, channels = images.shape[:2]
        tiles = images.reshape(batch, channels, rows, height, columns, width)
        tiles = tiles.permute(0, 2, 4, 1, 3, 5)  # (B, rows, columns, C, h, w)
        positions = torch.arange(rows * columns, device=images.device).expand(batch, -1)
        return tiles.reshape(batch, rows * columns, -1), positions

    def classify_images(
        self,
        images: Float[Tensor, "batch channels height width"],
        drop_masks: Float[Tensor, "depth 2 batch 1 1"] | None = None,
    ) -> tuple[Float[Tensor, "batch classes"], ...]:
        """Returns the logits for whole images, as an ordinary DeiT does."""
        return self.classify(self(*self.all_patches(images), drop_masks))
