"""The actors, which rate locations, and the critic, which predicts returns.

The paper's symbols: actor A, critic C, state s = [f_g ; f_d], glimpse-location embeddings e.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stam.shapes import Float, Int

_STEP_OF_ORDER = 0.1  # between two logits: a policy that samples by them strays from the order a little


class RowNorm(nn.BatchNorm1d):
    """Batch normalisation that also takes a batch of one.

    Departs from the paper: a single row has no variance, so it is normalised by the running statistics.
    """

    def forward(self, rows: Float[Tensor, "rows features"]) -> Float[Tensor, "rows features"]:
        """Normalises over the rows."""
        if self.training and rows.shape[0] == 1:
            mean, variance = self.running_mean, self.running_var
            return F.batch_norm(rows, mean, variance, self.weight, self.bias, training=False, eps=self.eps)
        return super().forward(rows)


class PairLinear(nn.Linear):
    """A linear layer on [s ; e] for every pair of a state s and an embedding e.

    W [s ; e] + b = (W_s s + b) + W_e e: one product for each state and one for each embedding, instead of
    one for every pair.
    """

    def forward(  # type: ignore[override]
        self, state: Float[Tensor, "batch features"], embedding: Float[Tensor, "locations width"]
    ) -> tuple[Float[Tensor, "batch outputs"], Float[Tensor, "locations outputs"]]:
        """Returns W_s s + b and W_e e, which are to be added for each pair."""
        for_state, for_embedding = self.weight.split((state.shape[1], embedding.shape[1]), dim=1)
        return F.linear(state, for_state, self.bias), F.linear(embedding, for_embedding)


class RowMlp(nn.Module):
    """Three times FC-BN-ReLU, then FC: the shape of actors and critic.

    They differ in what their first layer takes, and in how many numbers the last gives. A row is a sample for
    the critic, and a pair of a sample and a candidate location for the paper's actor; batch norm runs over
    all rows.
    """

    def __init__(self, first: nn.Linear, num_outputs: int = 1) -> None:
        super().__init__()
        hidden = first.out_features
        self.fc0, self.bn0 = first, RowNorm(hidden)
        self.fc1, self.bn1 = nn.Linear(hidden, hidden), RowNorm(hidden)
        self.fc2, self.bn2 = nn.Linear(hidden, hidden), RowNorm(hidden)
        self.fc_final = nn.Linear(hidden, num_outputs)

    def after_first_layer(self, rows: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows outputs"]:
        """Computes everything after the first linear layer."""
        rows = F.relu(self.bn0(rows))
        rows = F.relu(self.bn1(self.fc1(rows)))
        rows = F.relu(self.bn2(self.fc2(rows)))
        return self.fc_final(rows)


class Actor(RowMlp):
    """Rates candidate locations, each from the state and the location's own embedding.

    Its gradient reaches the core through the state. Initialised by PyTorch's defaults.
    """

    def __init__(self, num_locations: int, width: int, hidden: int) -> None:
        super().__init__(PairLinear(3 * width, hidden))  # the state is 2 D wide, an embedding D
        self.location_embedding = nn.Parameter(torch.zeros(num_locations, width))

    def forward(
        self, state: Float[Tensor, "batch features"], candidates: Int[Tensor, "batch candidates"]
    ) -> Float[Tensor, "batch candidates"]:
        """Returns a logit for each candidate."""
        of_state, of_location = self.fc0(state, self.location_embedding)
        rows = of_state[:, None] + F.embedding(candidates, of_location)  # (B, K, hidden)
        return self.after_first_layer(rows.flatten(0, 1)).view(candidates.shape)


class JointActor(RowMlp):
    """Rates all locations at once, from the state alone: a row for each sample instead of one for each pair.

    It begins as a fixed order: whatever the state, it rates a location the higher the earlier it comes there.

    Departs from the paper. It takes a small part of the products of the paper's actor. Learning from sampled
    returns it is worse; learning from what every location is worth (`gains`) it is as good on digits.
    """

    def __init__(self, order: list[int], width: int, hidden: int) -> None:
        super().__init__(nn.Linear(2 * width, hidden), len(order))
        with torch.no_grad():
            self.fc_final.weight.zero_()
            self.fc_final.bias[torch.tensor(order)] = -_STEP_OF_ORDER * torch.arange(float(len(order)))

    def forward(
        self, state: Float[Tensor, "batch features"], candidates: Int[Tensor, "batch candidates"]
    ) -> Float[Tensor, "batch candidates"]:
        """Returns a logit for each candidate."""
        return self.after_first_layer(self.fc0(state)).gather(1, candidates)


class Critic(RowMlp):
    """Predicts the (normalised) return that follows a state; its gradient stops at the state.

    Initialised as in the authors' code: Xavier-uniform with gain 1.2, the last bias at 0.58.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(nn.Linear(2 * width, hidden))
        for layer in (self.fc0, self.fc1, self.fc2, self.fc_final):
            nn.init.xavier_uniform_(layer.weight, gain=1.2)
            nn.init.zeros_(layer.bias)
        nn.init.constant_(self.fc_final.bias, 0.58)

    def forward(self, state: Float[Tensor, "batch features"]) -> Float[Tensor, " batch"]:
        """Returns V(s), a normalised return; `ValueNormaliser` turns it into a return."""
        return self.after_first_layer(self.fc0(state.detach())).squeeze(1).float()
