"""Run with TRITON_INTERPRET=1: every kernel, in Triton's interpreter, against the plain operations."""

import copy
import dataclasses

import torch

from stam import AgentConfig
from stam.evaluation import look_until_sure
from stam.evaluation.speed import make_learner, random_batch
from stam.fast import kernels
from stam.fast.cuda import FusedBelief, encode, fuse, fuse_teacher
from stam.fast.cuda_policy import FusedSampledPolicy
from stam.fast.exit_pool import ExitPool
from stam.fast.kernels import decisions
from stam.fast.kernels.ranks import close_ranks
from stam.learning.loop import Place
from stam.learning.one_pass import step_values
from stam.model.agent import Agent, PlainLooker
from stam.model.belief import Belief
from stam.model.core import PatchMemory
from stam.model.policy import SampledPolicy, rate_each_step, unseen_candidates
from stam.settings import RunConfig, TrainingConfig

BATCH = 24  # batch norm over few rows magnifies every rounding
torch.set_autocast_dtype("cuda", torch.float32)  # what the kernels round to: nothing
torch.manual_seed(0)
agent = Agent(
    AgentConfig(
        num_classes=5,
        image_size=32,
        glimpse_size=8,
        patch_size=4,
        width=48,  # rows that do not fill a tile
        depth=3,
        num_heads=3,
        drop_path=0.3,
        actor_width=40,
        critic_width=16,
    )
).train()
agent.add_critic()
fused = copy.deepcopy(agent)
for count in (1, 9):
    locations = torch.stack([torch.randperm(16)[:count] for _ in range(BATCH)])
    patches = agent.grid.patches(agent.grid.cut(torch.randn(BATCH, 3, 32, 32), locations))
    inputs = patches, agent.positions[locations].flatten(1), agent.sample_drop_path(BATCH)
    rest = torch.stack([torch.randperm(16)[: 16 - count] for _ in range(BATCH)])
    log_q = (4 * torch.randn(BATCH, 5)).log_softmax(dim=1)
    found = []
    for one in (agent, fused):
        kernels.usable = lambda x, on=one is fused: on
        looker = fuse(one) if one is fused else PlainLooker(one)
        memory = PatchMemory(*inputs[:2])
        with torch.no_grad():
            unlearned = looker.core.read(memory, inputs[2])
        features = looker.core.read(memory, inputs[2])
        logits = looker.actor(features.flatten(1), rest)
        value = looker.critic(features.flatten(1))
        (features.square().sum() + logits.square().sum() + value.square().sum()).backward()
        grads = {name: p.grad for name, p in one.named_parameters() if p.grad is not None}
        belief = FusedBelief if one is fused else Belief
        with torch.no_grad():
            distance = belief(features.flatten(1), *one.core.classify(features)).divergence_from(log_q)
        results = {"features": features, "features, no gradient": unlearned, "logits": logits, "value": value}
        results |= {"distance": distance}
        found.append(results | grads | dict(one.named_buffers()))
        one.zero_grad(set_to_none=True)
    for name, wanted in found[0].items():
        message = f"{name} after {count} glimpses"
        if name not in found[1]:  # a bias that batch norm takes away again
            assert name.endswith("bias") and wanted.abs().max() < 1e-3, message
            continue
        torch.testing.assert_close(
            found[1][name], wanted, atol=1e-3, rtol=1e-3, msg=lambda text, at=message: f"{at}: {text}"
        )

# a core that is trained in part: the others' gradients are the same, and nothing is computed for what stays
for name, parameter in fused.named_parameters():
    parameter.requires_grad_(".mlp." not in name)
encode(fused.core, *inputs).square().sum().backward()
in_part = {name: p.grad for name, p in fused.named_parameters() if p.grad is not None}
fused.zero_grad(set_to_none=True)
fused.requires_grad_(True)
encode(fused.core, *inputs).square().sum().backward()
for name, parameter in fused.core.named_parameters(prefix="core"):
    assert (name in in_part) == (".mlp." not in name and parameter.grad is not None), name
    if name in in_part:
        torch.testing.assert_close(in_part[name], parameter.grad)

# a causal core: all steps in one pass
causal = Agent(dataclasses.replace(agent.config, core="causal")).train()
fused = copy.deepcopy(causal)
for steps in (1, 5):
    locations = torch.stack([torch.randperm(16)[:steps] for _ in range(BATCH)])
    glimpses = causal.grid.cut(torch.randn(BATCH, 3, 32, 32), locations)
    masks, found = causal.sample_drop_path(BATCH), []
    for one in (causal, fused):
        kernels.usable = lambda x, on=one is fused: on
        looker = fuse(one) if one is fused else one
        states = torch.stack([each.state for each in looker.believe_all(glimpses, locations, masks)])
        states.square().sum().backward()
        found.append(
            {"states": states.detach()} | {n: p.grad for n, p in one.named_parameters() if p.grad is not None}
        )
        one.zero_grad(set_to_none=True)
    assert found[0].keys() == found[1].keys()
    for name, wanted in found[0].items():
        torch.testing.assert_close(
            found[1][name], wanted, atol=1e-3, rtol=1e-3, msg=lambda text, at=name: f"causal {at}: {text}"
        )

# a causal core glimpse by glimpse; its memory selected, joined, gone on from twice; glimpses tried
kernels.usable = lambda x: True
causal.eval()
looker, plain = fuse(causal), PlainLooker(causal)
scenes = torch.randn(BATCH, 3, 32, 32)
locations = torch.stack([torch.randperm(16)[:10] for _ in range(BATCH)])
glimpses = causal.grid.cut(scenes, locations)
with torch.no_grad():
    wanted = [each.state for each in plain.believe_all(glimpses, locations)]
    memories, memory = [], None
    for step in range(10):
        memory = looker.remember(memory, glimpses[:, step], locations[:, step])
        torch.testing.assert_close(looker.believe(memory).state, wanted[step], atol=1e-3, rtol=1e-3)
        memories.append(memory)
    again = looker.remember(memories[3], glimpses[:, 4], locations[:, 4])  # what came after stays as it was
    torch.testing.assert_close(looker.believe(again).state, wanted[4], atol=1e-3, rtol=1e-3)
    even, odd = torch.arange(0, BATCH, 2), torch.arange(1, BATCH, 2)
    mixed = memories[6].join([memories[2].select(even), memories[6].select(odd)])
    order, steps = torch.cat((even, odd)), torch.tensor([3] * len(even) + [7] * len(odd))
    mixed = looker.remember(mixed, glimpses[order, steps], locations[order, steps])
    expected = torch.stack([wanted[step][sample] for sample, step in zip(order, steps, strict=True)])
    torch.testing.assert_close(looker.believe(mixed).state, expected, atol=1e-3, rtol=1e-3)
    counts = torch.arange(BATCH) % 9 + 1
    tried = torch.arange(16).expand(BATCH, -1)
    found = looker.believe_each(memories[-1], counts, causal.grid.cut(scenes, tried), tried)
    memory = None
    for step in range(10):
        memory = plain.remember(memory, glimpses[:, step], locations[:, step])
    expected = plain.believe_each(memory, counts, causal.grid.cut(scenes, tried), tried)
    torch.testing.assert_close(found.state, expected.state, atol=1e-3, rtol=1e-3)

# actor and critic after several steps at once: batch norms take each step by itself
torch.manual_seed(1)
one_by_one = Agent(dataclasses.replace(agent.config, core="causal")).train()
one_by_one.add_critic()
at_once = copy.deepcopy(one_by_one)
states = torch.randn(3, 5, 2 * agent.config.width)
candidates = torch.stack([torch.randperm(16)[:15] for _ in range(15)]).view(3, 5, 15)
weights, found = torch.randn(3, 5, 15), []
for one in (one_by_one, at_once):
    kernels.usable = lambda x, on=one is at_once: on
    given = states.clone().requires_grad_()
    looker = fuse(one) if one is at_once else PlainLooker(one)
    logits = rate_each_step(looker.actor, given, candidates)
    values = step_values(looker.critic, given)
    ((logits * weights).square().sum() + (values * weights[..., 0]).sum()).backward()
    grads = {name: p.grad for name, p in one.named_parameters() if p.grad is not None}
    results = {"logits of steps": logits, "values of steps": values, "gradient of states": given.grad}
    found.append(results | grads | dict(one.named_buffers()))
for name, wanted in found[0].items():
    if name not in found[1]:
        assert name.endswith("bias") and wanted.abs().max() < 1e-3, name
        continue
    torch.testing.assert_close(
        found[1][name], wanted, atol=1e-3, rtol=1e-3, msg=lambda text, at=name: f"steps, {at}: {text}"
    )

# a draw from the learned policy
seen = torch.zeros(7, 16, dtype=torch.bool)
for row in seen:
    row[torch.randperm(16)[:5]] = True
actor = at_once.actor.eval()
with torch.no_grad():
    for tau in (0.5, torch.tensor(4.0)):
        kernels.usable = lambda x: True
        fused_policy, plain_policy = FusedSampledPolicy(actor, tau), SampledPolicy(actor, tau)
        one, other = (
            policy.decide(states[0, :1].expand(7, -1), seen, torch.Generator().manual_seed(2), num_seen=5)
            for policy in (fused_policy, plain_policy)
        )
        assert one.location.equal(other.location)
        torch.testing.assert_close(one.log_probability, other.log_probability)
        whole = unseen_candidates(seen, 5)[0]
        assert decisions.unseen(seen, 11).equal(whole)

# scenes that are done leave a list
for size, number in ((5, 5), (2500, 2300), (40, 0)):
    order = torch.randperm(size)
    is_done = torch.rand(size + 1) < 0.6
    is_done[order[:number]] |= size == 5  # none of them stays
    left, wanted = torch.tensor([number]), [scene for scene in order[:number].tolist() if not is_done[scene]]
    close_ranks(order, is_done, left, spare=size)
    filler = wanted[0] if wanted else size
    assert order.tolist() == wanted + [filler] * (size - len(wanted)) and int(left) == len(wanted)

# early exit with all of it: a pool, whose last batch is chosen late or not
for core in ("causal", "reencoding"):
    torch.manual_seed(2)
    pooled = Agent(dataclasses.replace(agent.config, core=core, depth=2)).eval()
    torch.nn.init.normal_(pooled.core.head.weight, std=2.0)
    scenes, first = torch.randn(6, 3, 32, 32), torch.arange(6)
    kernels.usable = lambda x: False
    with torch.no_grad():
        threshold = float(pooled.look(scenes, 5, first).confidences.median())
        wanted = look_until_sure(PlainLooker(pooled), scenes, threshold, first, pooled.policy(), 5)
    assert 6 < wanted.num_glimpses.sum() < 30
    kernels.usable = lambda x: True
    looker = fuse(pooled)
    for is_late in (False, True):
        how = {"is_graphed": False, "is_late": is_late}
        pool = ExitPool(looker, looker.policy(), 5, most_scenes=7, batch_size=6 if is_late else 4, **how)
        found = pool(scenes, first, threshold)
        assert found.num_glimpses.equal(wanted.num_glimpses) and found.locations.equal(wanted.locations)
        torch.testing.assert_close(found.probabilities, wanted.probabilities, atol=1e-3, rtol=1e-3)

# a training in stages: a core alone, then a joint actor by what all locations are worth
staged = RunConfig(
    agent=dataclasses.replace(agent.config, core="causal", actor="joint", depth=2, drop_path=0.0),
    training=TrainingConfig(
        num_glimpses=4,
        batch_size=12,
        device="cpu",
        epochs=2,
        core_fraction=0.5,
        actor_objective="gains",
        actor_steps=1,
        feature_weight=1.0,
        base_lr=1e-3,
        actor_lr=1e-3,
        ema_batches=2,
    ),
)
found = []
for is_fused in (False, True):
    kernels.usable = lambda x, on=is_fused: on
    torch.manual_seed(3)
    made = make_learner(staged)
    if is_fused:
        made.looker, made.teach = fuse(made.agent), fuse_teacher(made.teacher).predict
    images, labels = random_batch(made)
    for epoch in (0, 1):
        made.learn_from(images, labels, Place(epoch, 0, True))
        found.append(made.meter.means())
assert set(found[0]) == {"supervised", "consistency", "features"} and set(found[1]) == {"actor"}
for wanted, got in zip(found[:2], found[2:], strict=True):
    assert wanted.keys() == got.keys()
    for name in wanted:
        assert abs(wanted[name] - got[name]) < 2e-3 * max(1, abs(wanted[name])), (name, wanted, got)
