"""The method written out a second time, slowly and literally from its description.

Nothing here is shared with the package: no factorised actor, no shortened last block, no fused attention,
loops instead of gathers. It reads the authors' parameter names and is what the package is compared with on
sizes the reference figures do not cover.
"""

import torch
import torch.nn.functional as F


def glimpse_patches(image, location, columns, glimpse, patch):
    """The patches of one glimpse, row by row, and their positions in the whole image."""
    top, left = location // columns * glimpse[0], location % columns * glimpse[1]
    width_in_patches = image.shape[2] // patch[1]
    patches, positions = [], []
    for y in range(top, top + glimpse[0], patch[0]):
        for x in range(left, left + glimpse[1], patch[1]):
            patches.append(image[:, y : y + patch[0], x : x + patch[1]].reshape(-1))
            positions.append(y // patch[0] * width_in_patches + x // patch[1])
    return patches, positions


def encode(sd, num_heads, patches, positions, drop_masks=None, prefix_tokens=2):
    """Features of the read-out tokens of one image."""
    weight, bias = sd["patch_embed.proj.weight"], sd["patch_embed.proj.bias"]
    width = bias.shape[0]
    readout = [sd["cls_token"][0, 0]] + ([sd["dist_token"][0, 0]] if prefix_tokens == 2 else [])
    rows = [token + sd["pos_embed"][0, i] for i, token in enumerate(readout)]
    for patch, position in zip(patches, positions, strict=True):
        rows.append(weight.reshape(width, -1) @ patch + bias + sd["pos_embed"][0, prefix_tokens + position])
    x = torch.stack(rows)
    depth = 1 + max(int(name.split(".")[1]) for name in sd if name.startswith("blocks."))
    for i in range(depth):
        p = f"blocks.{i}."
        y = F.layer_norm(x, (width,), sd[p + "norm1.weight"], sd[p + "norm1.bias"], 1e-6)
        q, k, v = (y @ sd[p + "attn.qkv.weight"].T + sd[p + "attn.qkv.bias"]).split(width, dim=1)
        heads = []
        for h in range(num_heads):
            part = slice(h * width // num_heads, (h + 1) * width // num_heads)
            scores = q[:, part] @ k[:, part].T / (width // num_heads) ** 0.5
            heads.append(scores.softmax(dim=1) @ v[:, part])
        y = torch.cat(heads, 1) @ sd[p + "attn.proj.weight"].T + sd[p + "attn.proj.bias"]
        x = x + (y if drop_masks is None else y * drop_masks[i, 0])
        y = F.layer_norm(x, (width,), sd[p + "norm2.weight"], sd[p + "norm2.bias"], 1e-6)
        y = F.gelu(y @ sd[p + "mlp.fc1.weight"].T + sd[p + "mlp.fc1.bias"])
        y = y @ sd[p + "mlp.fc2.weight"].T + sd[p + "mlp.fc2.bias"]
        x = x + (y if drop_masks is None else y * drop_masks[i, 1])
    return F.layer_norm(x, (width,), sd["norm.weight"], sd["norm.bias"], 1e-6)[:prefix_tokens]


def row_mlp(sd, prefix, rows, training):
    for i in range(3):
        rows = rows @ sd[f"{prefix}.fc{i}.weight"].T + sd[f"{prefix}.fc{i}.bias"]
        if training:
            mean, variance = rows.mean(0), rows.var(0, unbiased=False)
        else:
            mean, variance = sd[f"{prefix}.bn{i}.running_mean"], sd[f"{prefix}.bn{i}.running_var"]
        rows = (rows - mean) / (variance + 1e-5).sqrt()
        rows = (rows * sd[f"{prefix}.bn{i}.weight"] + sd[f"{prefix}.bn{i}.bias"]).clamp_min(0)
    return (rows @ sd[f"{prefix}.fc_final.weight"].T + sd[f"{prefix}.fc_final.bias"])[:, 0]


class NaiveStam:
    def __init__(self, sd, num_heads, columns, glimpse, patch):
        self.sd, self.num_heads = sd, num_heads
        self.columns, self.glimpse, self.patch = columns, glimpse, patch
        self.num_locations = sd["loc_pos_embed"].shape[1]

    def states(self, images, locations, drop_masks=None):
        out = []
        for b, image in enumerate(images):
            patches, positions = [], []
            for location in locations[b]:
                more = glimpse_patches(image, int(location), self.columns, self.glimpse, self.patch)
                patches, positions = patches + more[0], positions + more[1]
            masks = None if drop_masks is None else drop_masks[:, :, b, 0, 0]
            out.append(encode(self.sd, self.num_heads, patches, positions, masks).reshape(-1))
        return torch.stack(out)

    def logits(self, states):
        f_g, f_d = states.chunk(2, dim=1)
        sd = self.sd
        return f_g @ sd["head.weight"].T + sd["head.bias"], f_d @ sd["head_dist.weight"].T + sd[
            "head_dist.bias"
        ]

    def candidates(self, locations):
        return [[c for c in range(self.num_locations) if c not in row] for row in locations.tolist()]

    def actor(self, states, locations, training):
        open_ = self.candidates(locations)
        rows = [
            torch.cat((state, self.sd["loc_pos_embed"][0, c]))
            for state, row in zip(states, open_, strict=True)
            for c in row
        ]
        return row_mlp(self.sd, "location_module", torch.stack(rows), training).view(len(open_), -1), open_

    def greedy(self, images, first, num_glimpses):
        locations, logits = first[:, None], []
        for n in range(1, num_glimpses + 1):
            states = self.states(images, locations)
            logits.append(self.logits(states))
            if n < num_glimpses:
                rated, open_ = self.actor(states, locations, training=False)
                nxt = [row[int(i)] for row, i in zip(open_, rated.argmax(1), strict=True)]
                locations = torch.cat((locations, torch.tensor(nxt)[:, None]), 1)
        return locations, logits

    def training(self, images, labels, q, locations, tau, mu, nu, drop_masks, consistency="soft"):
        """Losses after each glimpse of a forced path; mu and nu are changed in place."""
        num_glimpses = locations.shape[1]
        for n in range(1, num_glimpses + 1):
            masks = drop_masks[n - 1]
            states = self.states(images, locations[:, :n], masks)
            g, d = self.logits(states)
            if consistency == "none":
                ensemble = (g.softmax(1) + d.softmax(1)) / 2
                total = -ensemble[range(len(labels)), labels].log().mean()
                parts = {"supervised": total}
            else:
                sup = -g.log_softmax(1)[range(len(labels)), labels].mean()
                if consistency == "hard":
                    con = -d.log_softmax(1)[range(len(labels)), q.argmax(1)].mean()
                else:
                    p_d = d.softmax(1)
                    con = (p_d * (p_d.log() - q.log())).sum(1).mean()
                parts, total = {"supervised": sup, "consistency": con}, (sup + con) / 2
            if n < num_glimpses:
                rated, open_ = self.actor(states, locations[:, :n], training=True)
                pi = (tau * rated / rated.norm(dim=1, keepdim=True)).softmax(1)
                chosen = [row.index(int(c)) for row, c in zip(open_, locations[:, n], strict=True)]
                log_pi = pi[range(len(chosen)), chosen].log()
                with torch.no_grad():
                    ahead = self.states(images, locations[:, : n + 1], masks)
                    g2, d2 = self.logits(ahead)
                    p = (g2.softmax(1) + d2.softmax(1)) / 2
                    reward = -(p * (p.log() - q.log())).sum(1)
                    target = (reward - reward.mean()) / reward.std(unbiased=False)
                    k = n - 1
                    if n + 1 < num_glimpses:
                        sigma = (nu[k + 1] - mu[k + 1] ** 2).sqrt()
                        target = target + sigma * row_mlp(self.sd, "critic", ahead, True) + mu[k + 1]
                    mu[k] = 0.99 * mu[k] + 0.01 * target.mean()
                    nu[k] = 0.99 * nu[k] + 0.01 * (target**2).mean()
                    z = (target - mu[k]) / (nu[k] - mu[k] ** 2).sqrt()
                value = row_mlp(self.sd, "critic", states.detach(), True)
                parts["actor"] = -(log_pi * (z - value).detach()).mean()
                parts["critic"] = (z - value).abs().mean()
                total = total + parts["actor"] + parts["critic"]
            yield total, parts
