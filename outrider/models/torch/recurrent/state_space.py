"""The recurrence of Mamba-2: a state matrix per head with a scalar decay (Dao and Gu 2024).

S_t = exp(a_t) S_{t-1} + x_t B_t^T and y_t = S_t C_t. A few tokens are processed by the state after
each, or by their inputs, like attention with a decay (see `staging`).
"""

import torch

from outrider.models.torch.recurrent.layer import Staged, Tensors, add_entries, add_product, pick
from outrider.models.torch.recurrent.rows import Rows
from outrider.models.torch.recurrent.scan import scan
from outrider.models.torch.recurrent.staging import WayCosts, keeps_states

STATE = "state"  # [B, H, P, N] float32
STATES = "states"  # [B, E, H, P, N], by states
# By inputs: [B, E, H, P], [B, E, H, N] and [B, E, H], the decay of each entry and its sum along the path.
_X, _B, _OWN, _DECAY = "x", "B", "own decay", "decay"
_COSTS = WayCosts(token_calls=4, token_moves=5, input_calls=19, input_moves=7)


def advance(
    staged: Staged,
    x: torch.Tensor,  # [B, L, H, P] inputs, scaled by the time step
    decay: torch.Tensor,  # [B, L, H] logarithm of the decay
    b: torch.Tensor,  # [B, L, H, N]
    c: torch.Tensor,  # [B, L, H, N]
    rows: Rows,
) -> torch.Tensor:
    """Add new entries and return their outputs [B, L, H, P]. All tensors are float32."""
    is_first = rows.num_entries == rows.num_new
    if STATES in staged.entries or (is_first and keeps_states(staged.base[STATE], rows.num_entries, _COSTS)):
        return _advance_by_states(staged, x, decay, b, c, rows)
    return _advance_by_inputs(staged, x, decay, b, c, rows)


def state_after(staged: Staged, rows: Rows, last: torch.Tensor) -> Tensors:
    """Return the state [B, H, P, N] after entry `last` [B]."""
    if STATES in staged.entries:
        return {STATE: pick(staged.entries[STATES], last)}
    total = staged.entries[_DECAY]
    at_last = pick(total, last)  # [B, H]
    on_path = pick(rows.ancestors, last)  # [B, E]
    weight = (at_last[:, None] - total).masked_fill(~on_path[..., None], -torch.inf).exp()  # [B, E, H]
    x = (staged.entries[_X] * weight[..., None]).permute(0, 2, 3, 1)  # [B, H, P, E]
    state = at_last.exp()[..., None, None] * staged.base[STATE]
    return {STATE: add_product(state, x, staged.entries[_B].transpose(1, 2))}


def _advance_by_states(
    staged: Staged, x: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor, rows: Rows
) -> torch.Tensor:
    outputs = []

    def step(index: int, before: torch.Tensor, out: torch.Tensor) -> None:
        torch.mul(before, decay[:, index].exp()[..., None, None], out=out)
        out.addcmul_(x[:, index, ..., None], b[:, index, :, None])
        outputs.append((c[:, index, :, None] @ out.mT)[..., 0, :])  # faster than a product with a column

    states = scan(staged.base[STATE], staged.entries.get(STATES), step, rows)
    add_entries(staged, {STATES: states})
    return torch.stack(outputs, 1)


def _advance_by_inputs(
    staged: Staged, x: torch.Tensor, decay: torch.Tensor, b: torch.Tensor, c: torch.Tensor, rows: Rows
) -> torch.Tensor:
    add_entries(staged, {_X: x, _B: b, _OWN: decay})
    path = rows.visible.to(decay.dtype)  # [B, L, E]
    total = path @ staged.entries[_OWN]  # [B, L, H]
    add_entries(staged, {_DECAY: total})
    weight = (total[:, :, None] - staged.entries[_DECAY][:, None]).masked_fill(~rows.visible[..., None], -torch.inf)
    scores = c.transpose(1, 2) @ staged.entries[_B].permute(0, 2, 3, 1)  # [B, H, L, E]
    scores = scores * weight.exp().permute(0, 3, 1, 2)
    out = scores @ staged.entries[_X].transpose(1, 2)  # [B, H, L, P]
    from_state = c.transpose(1, 2) @ staged.base[STATE].transpose(-1, -2)  # [B, H, L, P]
    out = out + total.exp().transpose(1, 2)[..., None] * from_state
    return out.transpose(1, 2)
