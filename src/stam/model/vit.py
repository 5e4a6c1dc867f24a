"""A DeiT/ViT encoder over any subset of an image's patches; parameters are named as in timm."""

from dataclasses import dataclass
from typing import TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stam.fast import kernels
from stam.fast.cpu import Linear
from stam.fast.lookup import look_up
from stam.learning.distributed import draw_rows
from stam.shapes import Float, Int


class PatchEmbed(nn.Module):
    """Projects flat patches; the weight has the shape of the convolution it is in a ViT."""

    def __init__(self, patch_size: tuple[int, int], channels: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, kernel_size=patch_size, stride=patch_size)

    def forward(self, patches: Float[Tensor, "batch tokens pixels"]) -> Float[Tensor, "batch tokens width"]:
        """Embeds patches flattened as (channel, row, column)."""
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class Attention(nn.Module):
    """Multi-head self-attention; the queries may be fewer than the tokens they attend to."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = Linear(width, 3 * width)
        self.proj = Linear(width, width)

    def forward(
        self, x: Float[Tensor, "batch tokens width"], num_queries: int | None = None
    ) -> Float[Tensor, "batch queries width"]:
        """Attends from the first `num_queries` tokens (all of them by default) to every token.

        The output projection `proj` is left to the residual sum that follows.
        """
        tokens, width = x.shape[1:]
        if kernels.usable(x):
            from stam.fast.kernels.attention import fits, linear_attention

            if fits(width // self.num_heads, tokens):  # faster for all tokens than torch's for a few
                mixed = linear_attention(x, self.qkv.weight, self.qkv.bias, self.num_heads)
                return mixed if num_queries is None else mixed[:, :num_queries]
        if num_queries is None:
            return self.mix(self.qkv(x))
        weights, biases = (part.split((width, 2 * width)) for part in (self.qkv.weight, self.qkv.bias))
        (query,) = self._heads(F.linear(x[:, :num_queries], weights[0], biases[0]), 1)
        key, value = self._heads(F.linear(x, weights[1], biases[1]), 2)
        return self._joined(attend(query, key, value))

    def mix(
        self, projected: Float[Tensor, "batch tokens projections"], num_queries: int | None = None
    ) -> Float[Tensor, "batch queries width"]:
        """The same, for tokens that went through `qkv` before."""
        query, key, value = self._heads(projected, 3)
        return self._joined(attend(query[:, :, :num_queries], key, value))

    def _joined(self, mixed: Float[Tensor, "batch heads queries head_width"]) -> Tensor:
        return mixed.transpose(1, 2).reshape(mixed.shape[0], mixed.shape[2], -1)

    def _heads(self, projected: Tensor, parts: int) -> tuple[Tensor, ...]:
        batch, tokens = projected.shape[:2]
        split = projected.view(batch, tokens, parts, self.num_heads, -1)
        return split.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, heads, tokens, D / heads)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Float[Tensor, "batch heads queries head_width"]:
    """Returns scaled dot-product attention.

    On a GPU not by cuDNN, which makes a plan anew for every number of tokens: an episode has one a glimpse.
    """
    if not query.is_cuda:
        return F.scaled_dot_product_attention(query, key, value)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return F.scaled_dot_product_attention(query, key, value)


@dataclass(frozen=True)
class Stream:
    """The residual stream between the parts of a block: tokens, and a branch that is still to be added.

    A branch ends with a linear layer, and after its sum comes a norm: together they are one step on a GPU.

    Attributes:
        tokens: What has been summed so far.
        inputs: What the branch's last layers are to be applied to; none where there is nothing to add.
        layers: Those layers: one, or two with GELU in between.
        scale: Factor of the branch for each sample (drop-path).
    """

    tokens: Float[Tensor, "batch tokens width"]
    inputs: Float[Tensor, "batch tokens features"] | None = None
    layers: tuple[Linear, ...] = ()
    scale: Float[Tensor, "batch 1 1"] | None = None

    def total(self) -> Float[Tensor, "batch tokens width"]:
        """Returns the sum."""
        if self.inputs is None:
            return self.tokens
        hidden, (*first, last) = self.inputs, self.layers
        for layer in first:
            hidden = layer.with_gelu(hidden)
        if self.scale is None:
            return last.added_to(self.tokens, hidden)
        return self.tokens + last(hidden) * self.scale

    def settle(self, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
        """Returns the sum and its norm."""
        if not kernels.usable(self.tokens):
            total = self.total()
            return total, norm(total)
        from stam.fast.kernels import residual

        if self.inputs is None:
            return residual.norm(self.tokens, norm.weight, norm.bias, norm.eps)
        inputs, layers = self.inputs, self.layers
        if len(layers) > 1 and not torch.is_grad_enabled():
            inputs, layers = layers[0].with_gelu(inputs), layers[1:]
        weights = tuple((layer.weight, layer.bias) for layer in layers)
        scaled = (norm.weight, norm.bias)
        return residual.linear_add_norm(self.tokens, inputs, weights, self.scale, scaled, norm.eps)


@dataclass(frozen=True)
class Started:
    """Tokens on their way through the first block, up to where they meet: each depends on itself alone.

    Attributes:
        tokens: What the transformer starts from.
        projected: Their queries, keys and values.
        made_with: The packed weights that made those.
    """

    tokens: Float[Tensor, "batch tokens width"]
    projected: Float[Tensor, "batch tokens projections"]
    made_with: Tensor | None

    def then(self, more: "Started") -> "Started":
        """Returns these tokens followed by others."""
        return Started(
            torch.cat((self.tokens, more.tokens), dim=1),
            torch.cat((self.projected, more.projected), dim=1),
            self.made_with,
        )

    def select(self, samples: Int[Tensor, " kept"]) -> "Started":
        """Returns the tokens of some samples."""
        return Started(self.tokens[samples], self.projected[samples], self.made_with)


class Mlp(nn.Module):
    """The two layers of a block's MLP; they are left to the residual sum that follows."""

    def __init__(self, width: int, hidden_width: int) -> None:
        super().__init__()
        self.fc1 = Linear(width, hidden_width)
        self.fc2 = Linear(hidden_width, width)

    @property
    def layers(self) -> tuple[Linear, Linear]:
        """Both, with GELU to come in between."""
        return self.fc1, self.fc2


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
        stream: Stream,
        drop_masks: Float[Tensor, "2 batch 1 1"] | None = None,
        num_queries: int | None = None,
    ) -> Stream:
        """Returns the stream after the block, of the first `num_queries` tokens, all of them by default."""
        scales = (None, None) if drop_masks is None else drop_masks.unbind()
        x, normed = stream.settle(self.norm1)
        return self._rest(x[:, :num_queries], self.attn(normed, num_queries), *scales)

    def start(self, tokens: Float[Tensor, "batch tokens width"]) -> Started:
        """Computes what each token needs no other for."""
        return Started(tokens, self.attn.qkv(self.norm1(tokens)), self.attn.qkv.packed)

    def go_on(self, started: Started, num_queries: int | None = None) -> Stream:
        """Returns the stream after the block, of tokens that were started with."""
        return self._rest(started.tokens[:, :num_queries], self.attn.mix(started.projected, num_queries))

    def _rest(
        self,
        x: Tensor,
        attended: Tensor,
        attention_scale: Tensor | None = None,
        mlp_scale: Tensor | None = None,
    ) -> Stream:
        """Returns the stream after the block, given what attention made of it."""
        x, normed = Stream(x, attended, (self.attn.proj,), attention_scale).settle(self.norm2)
        return Stream(x, normed, self.mlp.layers, mlp_scale)


class VisionTransformer(nn.Module):
    """DeiT, plain (class token) or distilled (class and distillation token), with its classifiers.

    It encodes any subset of patches, another one for each sample: every patch carries the position
    embedding of its place in the whole image, and only the patches given are embedded. The last block is
    computed for the read-out tokens alone, since nothing reads the others.
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
        self, batch_size: int, generator: torch.Generator | None = None
    ) -> Float[Tensor, "depth 2 batch 1 1"] | None:
        """Draws which residual branches to drop for each sample; `None` where nothing is dropped.

        The masks are returned, not kept, so that the look-ahead pass can use the same ones.
        """
        if not self.training or self.drop_path == 0:
            return None
        rates = self.get_buffer("drop_path_rates")
        keep = (1 - rates).view(-1, 1, 1, 1, 1)
        device = generator.device if generator is not None else rates.device
        noise = draw_rows(
            lambda rows: torch.rand(len(rates), 2, rows, 1, 1, generator=generator, device=device),
            batch_size,
            dim=2,
        )
        return (noise.to(rates.device) < keep) / keep

    def forward(
        self,
        patches: Float[Tensor, "batch tokens pixels"],
        positions: Int[Tensor, "batch tokens"],
        drop_masks: Float[Tensor, "depth 2 batch 1 1"] | None = None,
    ) -> Float[Tensor, "batch readout width"]:
        """Encodes patches and returns the normalised features of the read-out tokens."""
        return self._encode(Stream(self._tokens(patches, positions)), 0, drop_masks)

    def can_start(self) -> bool:
        """Tells whether it can begin before all patches are there: weights are packed, so they stay."""
        return self._first.attn.qkv.packed is not None

    def can_go_on(self, started: Started | None) -> TypeGuard[Started]:
        """Tells whether what was begun still holds."""
        return started is not None and self.can_start() and started.made_with is self._first.attn.qkv.packed

    def start(
        self, patches: Float[Tensor, "batch tokens pixels"], positions: Int[Tensor, "batch tokens"]
    ) -> Started:
        """Begins to encode patches, until where tokens meet."""
        return self._first.start(self._tokens(patches, positions))

    def start_more(
        self,
        started: Started,
        patches: Float[Tensor, "batch tokens pixels"],
        positions: Int[Tensor, "batch tokens"],
    ) -> Started:
        """Begins to encode further patches; those before are not computed again."""
        return started.then(self._first.start(self.embed(patches, positions)))

    def go_on(self, started: Started) -> Float[Tensor, "batch readout width"]:
        """Encodes what was begun: the same as `forward` of all its patches."""
        return self._encode(self._first.go_on(started, self._num_queries(0)), 1)

    def _encode(
        self, stream: Stream, first: int, drop_masks: Tensor | None = None
    ) -> Float[Tensor, "batch readout width"]:
        for index in range(first, len(self.blocks)):
            masks = None if drop_masks is None else drop_masks[index]
            stream = self.blocks[index](stream, masks, self._num_queries(index))
        return stream.settle(self.norm)[1]

    @property
    def _first(self) -> Block:
        return cast(Block, self.blocks[0])

    def _num_queries(self, index: int) -> int | None:
        return self.num_readout if index == len(self.blocks) - 1 else None

    def _tokens(self, patches: Tensor, positions: Tensor) -> Float[Tensor, "batch tokens width"]:
        """Returns what the transformer starts from; a GPU goes on in half precision, if it computes in it."""
        if not kernels.usable(patches):
            return torch.cat((self._readout_tokens(patches.shape[0]), self.embed(patches, positions)), dim=1)
        from stam.fast.kernels.embedding import embed

        weight, bias = self.patch_embed.proj.weight, self.patch_embed.proj.get_parameter("bias")
        of_positions = self.pos_embed[0, self.num_readout :] + bias
        table = torch.cat((self._readout_tokens(1)[0], of_positions))
        return embed(patches, weight, table, positions, self.num_readout)

    def embed(
        self, patches: Float[Tensor, "batch tokens pixels"], positions: Int[Tensor, "batch tokens"]
    ) -> Float[Tensor, "batch tokens width"]:
        """Returns patch tokens: each patch's projection plus the embedding of its position."""
        return self.patch_embed(patches) + look_up(self.pos_embed[0, self.num_readout :], positions)

    def _readout_tokens(self, batch_size: int) -> Tensor:
        tokens = torch.cat((self.cls_token, self.dist_token), 1) if self.distilled else self.cls_token
        return (tokens + self.pos_embed[:, : self.num_readout]).expand(batch_size, -1, -1)

    def classify(
        self, features: Float[Tensor, "batch readout width"]
    ) -> tuple[Float[Tensor, "batch classes"], ...]:
        """Returns the logits of the class token and, if distilled, of the distillation token."""
        logits = self.head(features[:, 0])
        return (logits, self.head_dist(features[:, 1])) if self.distilled else (logits,)

    def classify_images(
        self,
        images: Float[Tensor, "batch channels height width"],
        drop_masks: Float[Tensor, "depth 2 batch 1 1"] | None = None,
    ) -> tuple[Float[Tensor, "batch classes"], ...]:
        """Returns the logits for whole images, as an ordinary DeiT does."""
        return self.classify(self.encode_images(images, drop_masks))

    def encode_images(
        self,
        images: Float[Tensor, "batch channels height width"],
        drop_masks: Float[Tensor, "depth 2 batch 1 1"] | None = None,
    ) -> Float[Tensor, "batch readout features"]:
        """Returns the features of whole images."""
        (rows, columns), (height, width) = self.image_patches, self.patch_size
        batch, channels = images.shape[:2]
        tiles = images.reshape(batch, channels, rows, height, columns, width).permute(0, 2, 4, 1, 3, 5)
        positions = torch.arange(rows * columns, device=images.device).expand(batch, -1)
        return self(tiles.reshape(batch, rows * columns, -1), positions, drop_masks)
